"""PaddleViT's other families: a file of Swin, CaiT and so on becomes timm's model of that name if their fields agree."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from configs.values import BOOLS, Text, is_none, quoted
from configs.yaml_files import Layer
from utils.errors import ConfigError

_SECTIONS = ("", "TRANS.", "TRANS.ENCODER.", "CNN.", "MIXER.")  # where a field may be, below MODEL
_OLD_NAMES = {"HIDDEN_SIZE": "EMBED_DIM", "NUM_LAYERS": "DEPTH"}  # in 2021
_PRETRAINING, _DISTILLATION = "MODEL.MAE_PRETRAIN", "TRAIN.DISTILLATION_TYPE"

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
        texts = {f"TRAIN.{name}": text for name, text in zip(names, values, strict=True) if text != "-"}
        for words in (_AUGMENTATION if "a" in kinds else "", _OTHERS.get(family, "")):
            texts |= dict(f"TRAIN.{word}".split("=") for word in words.split())
        if "TRAIN.MODEL_EMA_DECAY" in texts:
            texts["TRAIN.MODEL_EMA"] = "true"
        if "TRAIN.DROPPATH" in texts:
            texts["MODEL.DROPPATH"] = texts.pop("TRAIN.DROPPATH")
        if "i" in kinds:
            texts |= {"DATA.IMAGENET_MEAN": "[0.485, 0.456, 0.406]", "DATA.IMAGENET_STD": "[0.229, 0.224, 0.225]"}
        families[family] = texts
    return families


DEFAULTS = _defaults()  # {MODEL.TYPE in lower case: {setting: text}}

# For each MODEL.TYPE in lower case, where timm's model shows the value of a field: a path of attributes, in which a number is
# a place, * each of several, # how many there are, `ratio` the features that go out of a layer for one that goes in, and
# `is_there` and `name_of` what they say. Two paths are a list. None: the model that was built does not show it.
Path = str | Callable[[Any], Any] | None  # or a function of the model
_ENDS: dict[str, Callable[[Any], Any]] = {
    "#": len,
    "ratio": lambda layer: layer.out_features / layer.in_features,
    "is_there": lambda found: found is not None,
    "name_of": lambda found: type(found).__name__,
}
_COLUMNAR: dict[str, Path] = {  # a stack of equal blocks, as in ViT
    "PATCH_SIZE": "patch_embed.patch_size.0",
    "EMBED_DIM": "embed_dim",
    "DEPTH": "blocks.#",
    "NUM_HEADS": "blocks.0.attn.num_heads",
    "MLP_RATIO": "blocks.0.mlp.fc1.ratio",
    "QKV_BIAS": "blocks.0.attn.qkv.bias.is_there",
}
_MIXER: dict[str, Path] = {
    "PATCH_SIZE": "stem.patch_size.0",
    "EMBED_DIM": "stem.proj.out_channels",
    "DEPTH": "blocks.#",
    "MLP_RATIO": "blocks.0.mlp_channels.fc1.ratio",
}
_COAT: dict[str, Path] = {
    "PATCH_SIZE": "patch_embed1.patch_size.0",
    "EMBED_DIMS": " ".join(f"patch_embed{stage}.proj.out_channels" for stage in range(1, 5)),
    "SERIAL_DEPTHS": " ".join(f"serial_blocks{stage}.#" for stage in range(1, 5)),
    "PARALLEL_DEPTH": lambda model: len(model.parallel_blocks or ()),
    "NUM_HEADS": "serial_blocks1.0.factoratt_crpe.num_heads",
    "MLP_RATIOS": " ".join(f"serial_blocks{stage}.0.mlp.fc1.ratio" for stage in range(1, 5)),
}
_VOLO_STAGES = "network.0.{0} network.2.{0} network.3.{0} network.4.{0}"  # at 1 is the downsampling
FIELDS: dict[str, dict[str, Path]] = {
    "beit": {
        **_COLUMNAR,
        "QKV_BIAS": "blocks.0.attn.q_bias.is_there",
        "USE_ABS_POS_EMB": "pos_embed.is_there",
        "USE_REL_POS_BIAS": "blocks.0.attn.relative_position_bias_table.is_there",
        "INIT_VALUES": None,
    },
    "cait": {**_COLUMNAR, "DEPTH_TOKEN_ONLY": "blocks_token_only.#", "INIT_VALUES": None},
    "coat": _COAT,
    "coat_lite": _COAT,
    "convmixer": {
        "DIM": "stem.0.out_channels",
        "DEPTH": "blocks.#",
        "KERNEL_SIZE": "blocks.0.0.fn.0.kernel_size.0",
        "PATCH_SIZE": "stem.0.kernel_size.0",
        "ACTIVATION": "stem.1.name_of",
    },
    "convnext": {"DEPTHS": "stages.*.blocks.#", "DIMS": "stages.*.blocks.0.conv_dw.in_channels"},
    "deit": _COLUMNAR,
    "gatedmlp": _MIXER,
    "mae": {**_COLUMNAR, "MASK_RATIO": None, "MAE_PRETRAIN": None},  # of which take_family refuses true
    "mobileone": {
        "NUM_BRANCHES": "stem.conv_kxk.# stages.*.0.conv_kxk.#",
        "USE_SE": lambda model: any(type(each.attn).__name__ != "Identity" for stage in model.stages for each in stage),
        "EXPANSIONS": None,
        **dict.fromkeys(("NUM_BLOCKS", "CHANNELS", "STRIDES", "DEPLOY")),  # the same in all of PaddleViT's files
    },
    "mobilevit": {
        "DIMS": "stem.conv.out_channels stages.0.*.conv3_1x1.conv.out_channels stages.1.*.conv3_1x1.conv.out_channels "
        + "".join(f"stages.{stage}.0.conv3_1x1.conv.out_channels " for stage in (2, 3, 4))
        + "final_conv.conv.out_channels",
        "HIDDEN_DIMS": " ".join(f"stages.{stage}.1.transformer.0.attn.qkv.in_features" for stage in (2, 3, 4)),
    },
    "poolformer": {
        "LAYERS": "stages.*.blocks.#",
        "EMBED_DIMS": "stages.*.blocks.0.mlp.fc1.in_channels",
        "LAYER_SCALE_INIT_VALUE": None,
    },
    "regnet": {},
    "resmlp": _MIXER,
    "swin": {
        "PATCH_SIZE": "patch_embed.patch_size.0",
        "WINDOW_SIZE": "layers.0.blocks.0.window_size.0",
        "EMBED_DIM": "embed_dim",
        "STAGE_DEPTHS": "layers.*.blocks.#",
        "NUM_HEADS": "layers.*.blocks.0.attn.num_heads",
        "MLP_RATIO": "layers.0.blocks.0.mlp.fc1.ratio",
        "QKV_BIAS": "layers.0.blocks.0.attn.qkv.bias.is_there",
    },
    "volo": {
        "STEM_HIDDEN_DIM": "patch_embed.conv.0.out_channels",
        "LAYERS": _VOLO_STAGES.format("#"),
        "EMBED_DIMS": _VOLO_STAGES.format("0.mlp.fc1.in_features"),
        "NUM_HEADS": _VOLO_STAGES.format("0.attn.num_heads"),
        "MLP_RATIOS": _VOLO_STAGES.format("0.mlp.fc1.ratio"),
        **dict.fromkeys(("DOWNSAMPLES", "OUTLOOK_ATTENTION")),  # the same in all of PaddleViT's files
    },
    "xcit": {
        **_COLUMNAR,
        "PATCH_SIZE": "patch_embed.patch_size",
        "TOKENS_NORM": "cls_attn_blocks.0.tokens_norm",
        "ETA": None,
    },
}


@dataclass(frozen=True)
class Family:
    """A model of another family, as PaddleViT's file describes it."""

    kind: str  # MODEL.TYPE in lower case
    origin: str  # the file with MODEL.TYPE
    fields: dict[str, tuple[str, Text]]  # {field: (its key in the file, its value)}

    def agree(self, name: str) -> str:
        """The line that timm's model of this name is what the file describes; an error if it is not."""
        import timm  # takes seconds, as torch, and only these files need it
        import torch

        name = name.partition(".")[0]  # without the tag of its weights
        if not timm.is_model(name):
            raise ConfigError(
                f"MODEL.NAME is {name!r}, but timm has no such model; leave it out for {self.origin}'s own"
            )
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except RuntimeError:  # timm 1.0.20 reads values while it builds some of its models
            model = timm.create_model(name)
        readers = FIELDS[self.kind]
        for field, (key, text) in self.fields.items():
            if readers[field] and not _is_same(text, found := _read(model, readers[field])):
                raise ConfigError(
                    f"{self.origin}: {key} is {quoted(text)}, but timm's {name} has {found}; correct MODEL.NAME, or "
                    f"remove {key} to train timm's model"
                )
        compared = [field for field in self.fields if readers[field]]
        others = [field for field in self.fields if not readers[field]]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return (
            f"{self.origin}: MODEL.TYPE {self.kind} is built as timm's {name}, {parameters:,} parameters with 1000 "
            f"classes; compared with the file: {', '.join(compared) or 'nothing, it has no fields'}"
            + (f"; as timm sets them, because the model does not show them: {', '.join(others)}" if others else "")
        )


def take_family(files: list[Layer], command_line: list[Layer]) -> tuple[list[Layer], Family | None]:
    """Put timm's model in place of another family's in the layers of files, and PaddleViT's defaults for it below them.

    Returns the layers and the family; the layers as they are and None if the model is not of a family that timm has.
    """
    typed = next((layer for layer in reversed(files) if "MODEL.TYPE" in layer.texts), None)
    kind = _word(typed.texts["MODEL.TYPE"]) if typed else ""
    name = _timm_name(_last(files, "MODEL.NAME")) if kind in DEFAULTS else ""
    if not name:
        return files, None
    if BOOLS.get(_word(_last(files, _PRETRAINING))):
        raise ConfigError(f"{typed.origin}: {_PRETRAINING} is true, and masked pretraining is not available")
    if _word(_last(command_line, "MODEL.TYPE")) not in ("", "timm"):
        raise ConfigError(f"MODEL.TYPE on the command line is not timm, but {typed.origin} has {kind}; leave it out")
    distillation = _last([*files, *command_line], _DISTILLATION)
    if kind == "deit" and not is_none(distillation):
        name = _timm_name(name.replace("_patch", "_distilled_patch")) or name
    fields: dict[str, tuple[str, Text]] = {}
    layers = [Layer(f"PaddleViT's defaults for {kind}", DEFAULTS[kind])]
    for layer in files:
        texts = dict(layer.texts)
        for key in layer.texts:
            if key in ("MODEL.TYPE", "MODEL.NAME"):
                del texts[key]
            elif field := _field(key, kind):
                fields[field] = (key, texts.pop(key))
        if layer is typed:
            texts |= {"MODEL.TYPE": "timm", "MODEL.NAME": name}
        layers.append(replace(layer, texts=texts))
    return layers, Family(kind, typed.origin, fields)


def _field(key: str, kind: str) -> str | None:
    """The family's field that a key is, or None."""
    for section in _SECTIONS:
        name = key.removeprefix(f"MODEL.{section}")
        name = _OLD_NAMES.get(name, name)
        if name in FIELDS[kind]:
            return name
    return None


def _timm_name(text: Text | None) -> str:
    """timm's model of the name that PaddleViT writes with capitals and hyphens, or an empty text."""
    from utils.torch_internals import import_timm  # which, like timm, takes seconds

    timm = import_timm()
    name = _word(text).replace("-", "_")
    return name if timm.is_model(name) else ""


def _last(layers: list[Layer], key: str) -> Text:
    """The text of the last layer that has the key; empty if none has."""
    return next((layer.texts[key] for layer in reversed(layers) if key in layer.texts), "")


def _word(text: Text | None) -> str:
    return text.strip().lower() if isinstance(text, str) else ""


def _read(model: Any, path: Path) -> Any:
    """The value that a path of FIELDS leads to."""
    if callable(path):
        return path(model)
    if " " in path:
        parts = [_read(model, each) for each in path.split()]
        return [each for part in parts for each in (part if isinstance(part, list) else [part])]
    name, _, rest = path.partition(".")
    if name == "*":
        return [_read(each, rest) for each in model]
    if name in _ENDS:
        return _ENDS[name](model)
    found = model[int(name)] if name.isdigit() else getattr(model, name)
    return _read(found, rest) if rest else found


def _is_same(text: Text, found: object) -> bool:
    """Whether a file's text says what was found in timm's model."""
    if isinstance(found, list):
        members = text if isinstance(text, list) else text.strip("()[] ").split(",")
        return len(members) == len(found) and all(map(_is_same, members, found))
    word = _word(text)
    if isinstance(found, bool):
        return BOOLS.get(word) is found
    if isinstance(found, str):
        return word == found.lower()
    try:
        return float(word) == found
    except ValueError:
        return False
