"""Recognises the settings and values of PaddleViT and other programs.

extras/paddlevit translates the settings that occur only in PaddleViT's files.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from configs.values import SETTINGS, Text
from configs.yaml_files import Layer

SECTION = "MODEL.TRANS"  # the section that describes a ViT's layers in PaddleViT's files of 2021
KEYS = {
    "LOCAL_RANK",
    "MODEL.ATTN_HEAD_SIZE",
    "MODEL.PATCH_GRID",
    "TAG",
    "TRAIN.MODEL_EMA_FORCE_CPU",
    "TRAIN.RANDOM_ERASE_SPLIT",
    "TRAIN.RAND_AUGMENT",
    "TRAIN.RAND_AUGMENT_LAYERS",
    "TRAIN.RAND_AUGMENT_MAGNITUDE",
}
VALUES = {
    "TRAIN.AUTO_AUGMENT": {"true", "yes", "on", "false", "no", "off"},
    "TRAIN.LR_SCHEDULER.NAME": {"warmupcosine"},
    "TRAIN.OPTIMIZER.NAME": {"adamwdl"},
    "TRAIN.TEACHER_MODEL": {"./regnety_160.pdparams"},
}


Words = Mapping[str, Mapping[str, tuple[str, str]]]  # {setting: {word in lower case: (our value, reason)}}

_NO_CLIPPING = ("None", "no clipping")
OTHER_WORDS: Words = {
    "NGPUS": {"-1": ("None", "one process per visible device")},
    "PRECISION.MODE": {"apex_o1": ("autocast", "torch's autocast does the same as Apex's O1")},
    "PRECISION.DTYPE": {"fp16": ("float16", "the same type"), "bf16": ("bfloat16", "the same type")},
    "TRAIN.GRAD_CLIP": {"0": _NO_CLIPPING, "0.0": _NO_CLIPPING, "0.": _NO_CLIPPING},
}


class Translated(NamedTuple):
    """The layers of the files and the command line, translated into our settings."""

    layers: list[Layer]
    notes: list[str]  # one for each translated value
    check_model: Callable[[str], str] | None = None  # compares the file with timm's model of this name; returns a note


def translate_paddlevit(files: list[Layer], command_line: list[Layer]) -> Translated:
    """Translate PaddleViT's settings in these layers, if there are any."""
    layers = [*files, *command_line]
    if not any(is_paddlevits(key, text) for layer in layers for key, text in layer.texts.items()):
        return Translated(layers, [])
    from configs.translate.paddlevit_files import translate_layers

    return translate_layers(files, command_line)


def our_name(key: str) -> str:
    """Return our name for a key under MODEL.TRANS in PaddleViT's files of 2021; return other keys unchanged."""
    if not key.startswith(f"{SECTION}."):
        return key
    from configs.translate.paddlevit_files import RENAMED

    return RENAMED.get(key, key)


def is_paddlevits(key: str, text: Text) -> bool:
    """Return whether this key, or this value of the key, occurs only in PaddleViT's files."""
    if key in KEYS or f"{key}.".startswith(f"{SECTION}."):
        return True
    if not isinstance(text, str):
        return False
    word = text.strip().lower()
    is_another_model = key == "MODEL.TYPE" and word not in SETTINGS[key].choices
    return is_another_model or word in VALUES.get(key, ())


def replace_words(texts: Mapping[str, Text], origin: str, words: Words = OTHER_WORDS) -> tuple[dict, list[str]]:
    """Return the texts with other programs' words replaced by our values, and a note for each replacement."""
    replaced, notes = dict(texts), []
    for key, text in texts.items():
        known = words.get(key, {})
        if isinstance(text, str) and text.strip().lower() in known:
            value, reason = known[text.strip().lower()]
            notes.append(f"{origin}: {key} {text} is read as {value}: {reason}")
            replaced[key] = value
    return replaced, notes
