"""What all translations share: words that become values of ours, PaddleViT's own section, and their result."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from configs.values import Text
from configs.yaml_files import Layer

SECTION = "MODEL.TRANS"  # the section that describes a ViT's layers in PaddleViT's files of 2021
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
