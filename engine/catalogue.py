"""timm's models: names that match words, parameters, licences, and accuracy on ImageNet. Needs no network."""

import csv
import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from utils.errors import ConfigError, did_you_mean

# By the name of weights: top-1 on ImageNet in percent (timm's results/results-imagenet.csv), and images per second of a
# prediction (timm's results/benchmark-infer-amp-nchw-pt291-cu128-4090.csv: an RTX 4090, half precision).
FIGURES = Path(__file__).with_name("imagenet.csv")
MARK = "  NON-COMMERCIAL"
RESEARCH_ONLY = {"apple-amlr", "seer-license"}  # in addition to licences with "nc" or "noncommercial" in their name

# The candidates of a choice that names none (engine/choice/): three sizes trained on the classes of ImageNet-21k, and
# three other kinds of pretraining. All of them may be used commercially.
USUAL = (
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_small_patch16_224.augreg_in21k_ft_in1k",
    "vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "vit_small_patch14_dinov2.lvd142m@224",  # from images alone
    "vit_base_patch16_clip_224.laion2b_ft_in12k_in1k",  # from images and their captions
    "convnext_tiny.in12k_ft_in1k",  # not a transformer
)


class Figures(NamedTuple):
    """The accuracy of weights on ImageNet, in percent, and their speed in images per second."""

    top1: float
    speed: float


@cache
def figures() -> dict[str, Figures]:
    with open(FIGURES, encoding="utf-8", newline="") as file:
        return {row["model"]: Figures(float(row["top1"]), float(row["speed"])) for row in csv.DictReader(file)}


class Model(NamedTuple):
    """A model or pretrained weights, with timm's metadata."""

    name: str
    parameters: int
    size: tuple[int, int]  # height and width of its images
    classes: int  # 0: no classifier
    licence: str  # '' if timm does not say
    has_weights: bool

    @property
    def is_non_commercial(self) -> bool:
        return licence_text(self.licence).endswith(MARK)


def licence_text(licence: str | None) -> str:
    """Return a licence with a mark if it forbids commercial use."""
    name = licence or "unknown"
    forbids = re.search(r"\bnc\b|noncommercial|non-commercial", name) or name in RESEARCH_ONLY
    return name + MARK if forbids else name


def find_names(words: Sequence[str]) -> list[str]:
    """Return the names of timm's pretrained weights that match all words, or of architectures if no weights match.

    A word is a part of the name, or a pattern with * or ? for the whole name, with or without its tag.
    """
    import timm

    names = sorted(timm.list_pretrained())
    if matches_of_words := matching(names, words) or matching(timm.list_models(), words):
        return matches_of_words
    for word in words:
        if not matching(names, [word]):
            parts = {part for name in names for part in (name.partition(".")[0], *re.split(r"[._]", name))}
            raise ConfigError(f"{word}: timm has no model with this in its name{did_you_mean(word, sorted(parts))}")
    raise ConfigError(f"{' '.join(words)}: no name matches all of these words; leave one of them out")


def is_pattern(word: str) -> bool:
    return bool(set(word) & set("*?["))


def matching(names: Iterable[str], words: Sequence[str]) -> list[str]:
    """Return the names that match. Names that begin with the first word come first: vit_tiny before crossvit_tiny."""

    def matches(name: str, word: str) -> bool:
        if not is_pattern(word):
            return word in name
        return fnmatch.fnmatchcase(name, word) or fnmatch.fnmatchcase(name.partition(".")[0], word)

    matches_of_words = [name for name in names if all(matches(name.lower(), word.lower()) for word in words)]
    return (
        sorted(matches_of_words, key=lambda name: not name.lower().startswith(words[0].lower()))
        if words
        else matches_of_words
    )


def best_of(names: Sequence[str], most: int) -> list[str]:
    """Return at most this many of the names: those that no other name beats in both accuracy and speed, evenly spread.

    If there are fewer of them, the most accurate others follow. Names without figures come last.
    """
    known = figures()
    ranked = sorted(names, key=lambda name: -known[name].top1 if name in known else 0.0)
    front, fastest = [], 0.0
    for name in ranked:
        if name in known and known[name].speed > fastest:
            front.append(name)
            fastest = known[name].speed
    if len(front) >= most:
        return [front[round(step * (len(front) - 1) / (most - 1))] for step in range(most)]
    return [*front, *(name for name in ranked if name not in front)][:most]


def describe_models(names: Sequence[str]) -> list[Model]:
    """Return a Model for each name. Parameters are counted once for all weights of the same shapes."""
    import timm

    models, counts = [], {}
    for name in names:
        known, has_weights = timm.get_pretrained_cfg(name), timm.models.is_model_pretrained(name)
        shape = (name.partition(".")[0], known.num_classes, known.input_size)
        if shape not in counts:
            counts[shape] = count_parameters(name)
        licence = (known.license or "") if has_weights else ""
        facts = (known.input_size[1:], known.num_classes, licence, has_weights)
        models.append(Model(name, counts[shape], *facts))
    return models


def count_parameters(name: str) -> int:
    """Count a model's parameters on the meta device, without memory or download. A very large model takes a second."""
    import timm  # local: importing timm and torch takes seconds
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutInitialValues(TorchFunctionMode):
        """Skips functions that fill meta tensors, which would take three times as long as everything else."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            fills = function.__name__.endswith("_") and not function.__name__.endswith("__")
            if fills and isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
            if function is torch.Tensor.item and tensor.is_meta:  # timm 1.0.20 reads its drop-path rates
                return 0.0
            if function is torch.Tensor.tolist and tensor.is_meta:
                return [0.0] * len(tensor)
            return function(*args, **kwargs or {})

    with torch.device("meta"), WithoutInitialValues():
        model = timm.create_model(name, pretrained=False)
    return sum(parameter.numel() for parameter in model.parameters())
