"""PaddleViT's older ways of saying things, translated to today's names when a file is read."""

import difflib
import math
from dataclasses import replace

from configs.values import SETTINGS, Text, convert, is_none
from utils.errors import ConfigError

# The two dialects of 2021 keep the model's fields one level down; the older one also calls three of them otherwise.
OLD_SECTION = "MODEL.TRANS"
_HYBRID, _MLP_DIM = f"{OLD_SECTION}.HYBRID", f"{OLD_SECTION}.MLP_DIM"
_SAME_NAMES = (
    "PATCH_GRID",
    "PATCH_SIZE",
    "EMBED_DIM",
    "MLP_RATIO",
    "DEPTH",
    "NUM_HEADS",
    "ATTN_HEAD_SIZE",
    "QKV_BIAS",
)
RENAMED = {f"{OLD_SECTION}.{name}": f"MODEL.{name}" for name in _SAME_NAMES} | {
    f"{OLD_SECTION}.HIDDEN_SIZE": "MODEL.EMBED_DIM",
    f"{OLD_SECTION}.NUM_LAYERS": "MODEL.DEPTH",
    _MLP_DIM: "MODEL.MLP_RATIO",
}

# Values that are called otherwise here: {key: {their word: (our word, why)}}.
_NO_CLIPPING = ("None", "no clipping")
OTHER_WORDS = {
    "TRAIN.LR_SCHEDULER.NAME": {
        "warmupcosine": ("cosine", "the same schedule, moving every update; PaddleViT's own, once an epoch: paddlevit")
    },
    "TRAIN.GRAD_CLIP": {"0": _NO_CLIPPING, "0.0": _NO_CLIPPING, "0.": _NO_CLIPPING},
    "TRAIN.AUTO_AUGMENT": {
        **dict.fromkeys(("true", "yes", "on"), ("original", "AutoAugment's policy for ImageNet")),
        **dict.fromkeys(("false", "no", "off"), ("None", "no policy")),
    },
    "NGPUS": {"-1": ("None", "one process per visible device")},
    "PRECISION.MODE": {"apex_o1": ("autocast", "Apex's O1 is what torch's autocast does")},
    "PRECISION.DTYPE": {"fp16": ("float16", "the same type"), "bf16": ("bfloat16", "the same type")},
}


def translate(texts: dict[str, Text], origin: str) -> tuple[dict[str, Text], list[str]]:
    """The texts under today's names, and lines that say what was read otherwise than written."""
    _check_type(texts, origin)
    translated: dict[str, Text] = {}
    written_as: dict[str, str] = {}
    notes = []
    for key, text in texts.items():
        if key == _HYBRID:
            _refuse_hybrid(text, origin)
            continue
        if key == _MLP_DIM:
            text = _mlp_ratio(texts, origin)
        name = RENAMED.get(key, key)
        if name in translated:
            raise ConfigError(f"{origin}: {written_as[name]} and {key} are two names of one setting; keep one of them")
        other = OTHER_WORDS.get(name, {}).get(text.strip().lower()) if isinstance(text, str) else None
        if other:
            notes.append(f"{origin}: {name} {text} is read as {other[0]}: {other[1]}")
            text = other[0]
        translated[name] = text
        written_as[name] = key
    return translated, notes


def _check_type(texts: dict[str, Text], origin: str) -> None:
    """Before anything else about the file: the keys of another kind of model would only be called unknown."""
    kind, choices = texts.get("MODEL.TYPE", "vit"), SETTINGS["MODEL.TYPE"].choices
    if not isinstance(kind, str) or kind.strip().lower() in choices:
        return
    import timm  # takes seconds, and only this error needs it

    name = texts.get("MODEL.NAME", kind)
    name = name.lower().replace("-", "_") if isinstance(name, str) else kind
    models = timm.list_models()
    near = difflib.get_close_matches(name, models, n=2, cutoff=0.7)
    if name in models:
        advice = f"{name}, and remove MODEL's keys that describe layers"
    else:
        advice = f"a name from timm.list_models(){': nearest are ' + ' and '.join(near) if near else ''}"
    raise ConfigError(
        f"{origin}: MODEL.TYPE is {kind!r}; it must be vit or timm. For other models set MODEL.TYPE: timm and "
        f"MODEL.NAME: {advice}"
    )


def _refuse_hybrid(text: Text, origin: str) -> None:
    if not is_none(text) and str(text).strip().lower() not in ("false", "no", "off"):
        raise ConfigError(
            f"{origin}: {_HYBRID} is {text!r}; for a convolutional stem under the transformer set MODEL.TYPE: timm and "
            "MODEL.NAME to one of timm's hybrids, for example vit_base_r50_s16_224"
        )


def _mlp_ratio(texts: dict[str, Text], origin: str) -> str:
    width_key = next((key for key in texts if RENAMED.get(key, key) == "MODEL.EMBED_DIM"), None)
    if width_key is None:
        raise ConfigError(
            f"{origin}: {_MLP_DIM} says nothing without {OLD_SECTION}.HIDDEN_SIZE; give both or MLP_RATIO"
        )
    width_setting = SETTINGS["MODEL.EMBED_DIM"]  # what holds for one width holds for the other
    hidden = convert(replace(width_setting, key=_MLP_DIM), texts[_MLP_DIM], origin)
    width = convert(replace(width_setting, key=width_key), texts[width_key], origin)
    # A ViT's MLP has int(width * ratio) units: where the quotient was rounded down, that would be one too few.
    ratio = hidden / width
    return repr(ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf))
