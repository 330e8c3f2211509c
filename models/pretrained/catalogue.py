"""timm's models as a table: which names match some words, and what timm knows of each, without a network."""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from utils.errors import ConfigError

# Licences without a "nc" or "noncommercial" in their name that allow research only.
RESEARCH_ONLY = {"apple-amlr", "seer-license"}
PERMISSIVE = {"apache-2.0", "bsd-3-clause", "cc-by-4.0", "mit"}
UNKNOWN = {"", "unknown"}
# Operations in place by which models get their initial values; none changes a shape.
FILLING = {"uniform_", "normal_", "trunc_normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}
# What the parts of timm's tags say of the images that weights were trained with.
DATA = {
    "bamboo": "Bamboo",
    "cc12m": "CC12M",
    "datacomp1b": "DataComp-1B",
    "datacompxl": "DataComp-XL",
    "dfn2b": "DFN-2B",
    "dfn5b": "DFN-5B",
    "dfndr2b": "DFNDR-2B",
    "ig1b": "Instagram-1B",
    "in12k": "ImageNet-12k",
    "in1k": "ImageNet-1k",
    "in21k": "ImageNet-21k",
    "in22k": "ImageNet-22k",
    "inw21k": "ImageNet-21k (winter)",
    "jft": "JFT",
    "laion2b": "LAION-2B",
    "laion400m": "LAION-400M",
    "laiona": "LAION-A",
    "lvd142m": "LVD-142M",
    "lvd1689m": "LVD-1689M",
    "sa1b": "SA-1B",
    "sat493m": "SAT-493M",
    "webli": "WebLI",
    "yfcc100m": "YFCC-100M",
    "yfcc15m": "YFCC-15M",
}


class KnownModel(NamedTuple):
    """A row: what timm knows of one of its models."""

    name: str
    parameters: int
    sides: tuple[int, int]  # height and width of its images
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int  # of its classifier; 0: it has none
    data: str  # that its weights were trained with, the last at the end; "" if their tag does not say
    licence: str  # of its weights; "" if timm does not say
    has_weights: bool

    @property
    def is_non_commercial(self) -> bool:
        return bool(re.search(r"\bnc\b|noncommercial|non-commercial", self.licence)) or self.licence in RESEARCH_ONLY

    @property
    def has_own_terms(self) -> bool:
        """Whether its licence is neither a common permissive one nor known to be non-commercial."""
        return not self.is_non_commercial and self.licence not in PERMISSIVE | UNKNOWN


def find_names(words: Sequence[str], without_weights: bool = False) -> list[str]:
    """The names of timm's pretrained weights that match all of the words; ConfigError if there are none.

    A word is a part of the name, or a pattern with * or ? of the whole of it, with or without its tag.
    `without_weights`: also architectures that timm has no weights of.
    """
    import timm

    pretrained = timm.list_pretrained()
    bare = sorted(set(timm.list_models()) - {name.partition(".")[0] for name in pretrained})
    names = sorted([*pretrained, *bare] if without_weights else pretrained)
    if found := matching(names, words):
        return found
    if not without_weights and (others := matching(bare, words)):
        raise ConfigError(
            f"{' '.join(words)}: timm has no pretrained weights of this name, but {len(others)} without weights, such as "
            f"{others[0]}; -without_weights lists them"
        )
    alone = {word: len(matching(names, [word])) for word in words}
    if unknown := [word for word, number in alone.items() if not number]:
        raise ConfigError(f"{unknown[0]}: timm has no model with this in its name{_nearest(unknown[0], names)}")
    each = ", ".join(f"{word} alone {number}" for word, number in alone.items())
    raise ConfigError(f"{' '.join(words)}: no name matches all of these ({each}); leave one of them out")


def matching(names: Iterable[str], words: Sequence[str]) -> list[str]:
    """Those that begin with the first word come first: vit_tiny_patch16_224 before crossvit_tiny_240."""
    found = [name for name in names if all(_matches(name.lower(), word.lower()) for word in words)]
    return sorted(found, key=lambda name: not name.lower().startswith(words[0].lower())) if words else found


def _matches(name: str, word: str) -> bool:
    if not set(word) & set("*?["):
        return word in name
    return fnmatch.fnmatchcase(name, word) or fnmatch.fnmatchcase(name.partition(".")[0], word)


def _nearest(word: str, names: Sequence[str]) -> str:
    """The names, or the words in names, that are closest to one that there is not."""
    known = dict.fromkeys(part for name in names for part in (name.partition(".")[0], *re.split(r"[._]", name)))
    nearest = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else "; try a shorter part of it"


def describe_models(names: Sequence[str]) -> list[KnownModel]:
    """The rows of these names. Models are built for their shapes only, once for the weights that have the same."""
    import timm

    rows, counts = [], {}
    for name in names:
        known = timm.get_pretrained_cfg(name)
        has_weights = timm.models.is_model_pretrained(name)
        shape = (name.partition(".")[0], known.num_classes, known.input_size)
        if shape not in counts:
            counts[shape] = count_parameters(name)
        rows.append(
            KnownModel(
                name,
                counts[shape],
                tuple(known.input_size[1:]),
                tuple(known.mean),
                tuple(known.std),
                known.num_classes,
                data_of(known.tag) if has_weights else "",
                (known.license or "") if has_weights else "",
                has_weights,
            )
        )
    return rows


def count_parameters(name: str) -> int:
    """Of a model that exists in shapes only: no memory, no download, a second for one of billions."""
    import timm

    with torch.device("meta"), WithoutInitialValues():
        model = timm.create_model(name, pretrained=False)
    return sum(parameter.numel() for parameter in model.parameters())


class WithoutInitialValues(TorchFunctionMode):
    """Leaves out what fills tensors without memory: on the meta device that takes four times as long as the rest."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        if function.__name__ in FILLING and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        return function(*args, **kwargs)


def data_of(tag: str) -> str:
    """'ImageNet-21k, ImageNet-1k' of augreg_in21k_ft_in1k."""
    return ", ".join(dict.fromkeys(DATA[part] for part in re.split("[_.]", tag) if part in DATA))
