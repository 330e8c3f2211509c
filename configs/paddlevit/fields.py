"""What the fields of PaddleViT's other families say of a model, read from timm's model."""

from collections.abc import Callable
from typing import Any

from torch import nn

Reader = Callable[[nn.Module], Any]  # the value of one field, as PaddleViT's file would write it for this model


def _patch(model: nn.Module) -> int:
    return model.patch_embed.patch_size[0]


def _mlp_ratio(fc1: nn.Linear) -> float:
    return fc1.out_features / fc1.in_features


def _branches(block: nn.Module) -> int:
    return len(block.conv_kxk)


def _volo_stages(model: nn.Module) -> list[nn.Module]:
    """The four stages; timm's list also has the downsampling after the first."""
    return [each for each in model.network if isinstance(each, nn.Sequential)]


def _is_outlooker(stage: nn.Module) -> bool:
    return type(stage[0]).__name__ == "Outlooker"


_MOBILEONE_CHANNELS = (64, 64, 128, 256, 512)  # of the stem and the stages, before EXPANSIONS


def _mobileone_stages(model: nn.Module) -> list[nn.Sequential]:
    return [nn.Sequential(model.stem), *model.stages]


def _out_channels(block: nn.Module) -> int:
    return block.conv_kxk[0].conv.out_channels


# PaddleViT's MobileOne is a depthwise and a pointwise block in one; in timm they are two neighbours after the stem.
_MOBILEONE: dict[str, Reader] = {
    "NUM_BLOCKS": lambda model: [1, *(len(stage) // 2 for stage in model.stages)],
    "CHANNELS": lambda model: list(_MOBILEONE_CHANNELS),
    "EXPANSIONS": lambda model: [
        _out_channels(stage[-1]) / channels
        for stage, channels in zip(_mobileone_stages(model), _MOBILEONE_CHANNELS, strict=True)
    ],
    "STRIDES": lambda model: [stage[0].conv_kxk[0].conv.stride[0] for stage in _mobileone_stages(model)],
    "NUM_BRANCHES": lambda model: [_branches(stage[0]) for stage in _mobileone_stages(model)],
    "USE_SE": lambda model: not all(isinstance(block.attn, nn.Identity) for stage in model.stages for block in stage),
    "DEPLOY": lambda model: not hasattr(model.stem, "conv_kxk"),
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
        "DOWNSAMPLES": lambda model: (
            [type(each).__name__ == "Downsample" for each in model.network[1:2]]
            + [False] * (len(_volo_stages(model)) - 1)
        ),
        "OUTLOOK_ATTENTION": lambda model: [_is_outlooker(stage) for stage in _volo_stages(model)],
    },
    "xcit": {
        **_COLUMNAR,
        "PATCH_SIZE": lambda model: model.patch_embed.patch_size,
        "TOKENS_NORM": lambda model: model.cls_attn_blocks[0].tokens_norm,
        "ETA": None,
    },
}
