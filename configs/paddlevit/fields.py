"""PaddleViT's other families: what their config.py sets, and what the fields of their files say of timm's model."""

from collections.abc import Callable
from typing import Any

# One family a line. The last column: a, the augmentation that all but MAE have; i, ImageNet's mean and deviation.
# Some config.py have a DROPPATH that their model does not read (ConvMixer, PoolFormer), and VOLO's END_LR is 53-4, which
# Python reads as 49; taken for the 1e-5 of the others.
_TABLE = """
              NUM_EPOCHS WARMUP_EPOCHS WEIGHT_DECAY BASE_LR WARMUP_START_LR END_LR LINEAR_SCALED_LR MODEL_EMA_DECAY DROPPATH
    beit        100        20            0.05         4e-3    0.0             1e-6   512              0.9999          0.1      a
    cait        300        5             0.05         5e-4    1e-6            0.0    512              0.99996         0.1      ai
    coat        300        20            0.05         4e-3    1e-6            1e-5   512              0.99996         -        ai
    coat_lite   300        20            0.05         4e-3    1e-6            1e-5   512              0.99996         -        ai
    convmixer   300        20            0.1          1e-3    1e-6            1e-5   512              -               -        ai
    convnext    300        20            0.05         4e-3    1e-6            1e-5   512              0.9999          -        ai
    deit        300        5             0.05         5e-4    1e-6            0.0    512              0.99996         -        ai
    gatedmlp    300        20            0.1          1e-3    1e-6            1e-5   512              -               0.1      a
    mae         800        40            0.05         1.5e-4  1e-6            0.0    256              -               -        i
    mobileone   300        3             0.01         2e-3    2e-4            2e-4   None             0.9996          -        ai
    mobilevit   300        3             0.01         2e-3    2e-4            2e-4   None             0.9996          -        ai
    poolformer  300        5             0.05         1e-3    1e-6            1e-5   1024             -               -        ai
    regnet      300        5             0.05         5e-4    1e-6            0.0    512              0.99996         -        ai
    resmlp      300        20            0.1          1e-3    1e-6            1e-5   512              -               0.1      ai
    swin        300        20            0.05         5e-4    5e-7            5e-6   512              -               0.1      ai
    volo        300        3             0.05         1e-3    1e-6            1e-5   128              -               -        ai
    xcit        300        5             0.05         5e-4    1e-6            1e-5   512              -               0.1      ai
"""
_AUGMENTATION = (
    "SMOOTHING=0.1 COLOR_JITTER=0.4 RAND_AUGMENT=true MIXUP_ALPHA=0.8 CUTMIX_ALPHA=1.0 RANDOM_ERASE_PROB=0.25"
)
_OTHERS = {
    "beit": "LAYER_DECAY=0.65",
    "mae": "SMOOTHING=0.1 MIXUP_ALPHA=0.8 CUTMIX_ALPHA=1.0 OPTIMIZER.BETAS=[0.9,0.95]",
    "mobileone": "RAND_AUGMENT=false AUTO_AUGMENT=original",
    "swin": "GRAD_CLIP=5.0",
}


def _defaults() -> dict[str, dict[str, str]]:
    names, *rows = (line.split() for line in _TABLE.strip().splitlines())
    families = {}
    for family, *values, kinds in rows:
        texts = {name: text for name, text in zip(names, values, strict=True) if text != "-"}
        if "MODEL_EMA_DECAY" in texts:
            texts["MODEL_EMA"] = "true"
        for words in (_AUGMENTATION if "a" in kinds else "", _OTHERS.get(family, "")):
            texts |= dict(word.split("=") for word in words.split())
        found = {f"{'MODEL' if name == 'DROPPATH' else 'TRAIN'}.{name}": text for name, text in texts.items()}
        if "i" in kinds:
            found |= {"DATA.IMAGENET_MEAN": "[0.485, 0.456, 0.406]", "DATA.IMAGENET_STD": "[0.229, 0.224, 0.225]"}
        families[family] = found
    return families


DEFAULTS = _defaults()  # {MODEL.TYPE in lower case: {setting: text}}


Module = Any  # a torch.nn.Module; torch takes seconds to import, and only these families' files need a model
Reader = Callable[[Module], Any]  # the value of one field, as PaddleViT's file would write it for this model


def _patch(model: Module) -> int:
    return model.patch_embed.patch_size[0]


def _mlp_ratio(fc1: Module) -> float:
    return fc1.out_features / fc1.in_features


def _volo_stages(model: Module) -> list[Module]:
    """The four stages; timm's list also has the downsampling after the first."""
    return [each for each in model.network if type(each).__name__ == "Sequential"]


def _has_attention(block: Module) -> bool:
    return type(block.attn).__name__ != "Identity"


def _mobileone_firsts(model: Module) -> list[Module]:
    """The first block of the stem and of each stage."""
    return [model.stem, *(stage[0] for stage in model.stages)]


# PaddleViT's MobileOne is a depthwise and a pointwise block in one; in timm they are two neighbours after the stem.
_MOBILEONE: dict[str, Reader | None] = {
    "NUM_BLOCKS": lambda model: [1, *(len(stage) // 2 for stage in model.stages)],
    "EXPANSIONS": lambda model: [
        block.conv_kxk[0].conv.out_channels / channels
        for block, channels in zip(
            [model.stem, *(stage[-1] for stage in model.stages)], (64, 64, 128, 256, 512), strict=True
        )
    ],
    "NUM_BRANCHES": lambda model: [len(block.conv_kxk) for block in _mobileone_firsts(model)],
    "USE_SE": lambda model: any(_has_attention(block) for stage in model.stages for block in stage),
    # The same in all of PaddleViT's files.
    **dict.fromkeys(("CHANNELS", "STRIDES", "DEPLOY")),
}

_COLUMNAR: dict[str, Reader] = {  # a stack of equal blocks, as in ViT
    "PATCH_SIZE": _patch,
    "EMBED_DIM": lambda model: model.embed_dim,
    "DEPTH": lambda model: len(model.blocks),
    "NUM_HEADS": lambda model: model.blocks[0].attn.num_heads,
    "MLP_RATIO": lambda model: _mlp_ratio(model.blocks[0].mlp.fc1),
    "QKV_BIAS": lambda model: model.blocks[0].attn.qkv.bias is not None,
}

_MIXER: dict[str, Reader] = {
    "PATCH_SIZE": lambda model: model.stem.patch_size[0],
    "EMBED_DIM": lambda model: model.stem.proj.out_channels,
    "DEPTH": lambda model: len(model.blocks),
    "MLP_RATIO": lambda model: _mlp_ratio(model.blocks[0].mlp_channels.fc1),
}

_COAT: dict[str, Reader] = {
    "PATCH_SIZE": lambda model: model.patch_embed1.patch_size[0],
    "EMBED_DIMS": lambda model: [getattr(model, f"patch_embed{stage}").proj.out_channels for stage in range(1, 5)],
    "SERIAL_DEPTHS": lambda model: [len(getattr(model, f"serial_blocks{stage}")) for stage in range(1, 5)],
    "PARALLEL_DEPTH": lambda model: len(model.parallel_blocks or ()),
    "NUM_HEADS": lambda model: model.serial_blocks1[0].factoratt_crpe.num_heads,
    "MLP_RATIOS": lambda model: [
        _mlp_ratio(getattr(model, f"serial_blocks{stage}")[0].mlp.fc1) for stage in range(1, 5)
    ],
}

# For each MODEL.TYPE in lower case, how its fields are read; None: the model that was built does not show it.
FIELDS: dict[str, dict[str, Reader | None]] = {
    "beit": {
        **_COLUMNAR,
        "QKV_BIAS": lambda model: model.blocks[0].attn.q_bias is not None,
        "USE_ABS_POS_EMB": lambda model: model.pos_embed is not None,
        "USE_REL_POS_BIAS": lambda model: model.blocks[0].attn.relative_position_bias_table is not None,
        "INIT_VALUES": None,
    },
    "cait": {**_COLUMNAR, "DEPTH_TOKEN_ONLY": lambda model: len(model.blocks_token_only), "INIT_VALUES": None},
    "coat": _COAT,
    "coat_lite": _COAT,
    "convmixer": {
        "DIM": lambda model: model.stem[0].out_channels,
        "DEPTH": lambda model: len(model.blocks),
        "KERNEL_SIZE": lambda model: model.blocks[0][0].fn[0].kernel_size[0],
        "PATCH_SIZE": lambda model: model.stem[0].kernel_size[0],
        "ACTIVATION": lambda model: type(model.stem[1]).__name__,
    },
    "convnext": {
        "DEPTHS": lambda model: [len(stage.blocks) for stage in model.stages],
        "DIMS": lambda model: [stage.blocks[0].conv_dw.in_channels for stage in model.stages],
    },
    "deit": _COLUMNAR,
    "gatedmlp": _MIXER,
    "mae": {**_COLUMNAR, "MASK_RATIO": None, "MAE_PRETRAIN": lambda model: False},
    "mobileone": _MOBILEONE,
    "mobilevit": {
        # Stem, the blocks of the first two stages, the other stages, and the last convolution.
        "DIMS": lambda model: [
            model.stem.conv.out_channels,
            *(block.conv3_1x1.conv.out_channels for stage in model.stages[:2] for block in stage),
            *(stage[0].conv3_1x1.conv.out_channels for stage in model.stages[2:]),
            model.final_conv.conv.out_channels,
        ],
        "HIDDEN_DIMS": lambda model: [stage[1].transformer[0].attn.qkv.in_features for stage in model.stages[2:]],
    },
    "poolformer": {
        "LAYERS": lambda model: [len(stage.blocks) for stage in model.stages],
        "EMBED_DIMS": lambda model: [stage.blocks[0].mlp.fc1.in_channels for stage in model.stages],
        "LAYER_SCALE_INIT_VALUE": None,
    },
    "regnet": {},
    "resmlp": _MIXER,
    "swin": {
        "PATCH_SIZE": _patch,
        "WINDOW_SIZE": lambda model: model.layers[0].blocks[0].window_size[0],
        "EMBED_DIM": lambda model: model.embed_dim,
        "STAGE_DEPTHS": lambda model: [len(stage.blocks) for stage in model.layers],
        "NUM_HEADS": lambda model: [stage.blocks[0].attn.num_heads for stage in model.layers],
        "MLP_RATIO": lambda model: _mlp_ratio(model.layers[0].blocks[0].mlp.fc1),
        "QKV_BIAS": lambda model: model.layers[0].blocks[0].attn.qkv.bias is not None,
    },
    "volo": {
        "STEM_HIDDEN_DIM": lambda model: model.patch_embed.conv[0].out_channels,
        "LAYERS": lambda model: [len(stage) for stage in _volo_stages(model)],
        "EMBED_DIMS": lambda model: [stage[0].mlp.fc1.in_features for stage in _volo_stages(model)],
        "NUM_HEADS": lambda model: [stage[0].attn.num_heads for stage in _volo_stages(model)],
        "MLP_RATIOS": lambda model: [_mlp_ratio(stage[0].mlp.fc1) for stage in _volo_stages(model)],
        **dict.fromkeys(("DOWNSAMPLES", "OUTLOOK_ATTENTION")),  # the same in all of PaddleViT's files
    },
    "xcit": {
        **_COLUMNAR,
        "PATCH_SIZE": lambda model: model.patch_embed.patch_size,
        "TOKENS_NORM": lambda model: model.cls_attn_blocks[0].tokens_norm,
        "ETA": None,
    },
}
