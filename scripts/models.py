"""Lists timm's models: parameters, image size and licence of their weights. Needs no network.

    python scripts/models.py                         # six models to choose from, with accuracy and speed
    python scripts/models.py dinov3                  # models with this word in their names
    python scripts/models.py vit_small in21k         # models with all of these words in their names
    python scripts/models.py 'convnext*' -all        # all models whose whole name matches this pattern

Architectures without weights are listed only if no weights match. The name says which images the weights were trained
on: in21k_ft_in1k is ImageNet-21k, then ImageNet-1k. Weights that may not be used commercially are marked. Read the
licence of the weights before you use them, even if the list says "unknown".
"""

import fnmatch
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import Parser
from utils.commands import command
from utils.errors import ConfigError, did_you_mean
from utils.text import align

LIMIT = 60  # maximum number of rows without -all; this many take a few seconds
HEADER = ("name", "parameters", "image", "classes", "licence")
# Models to begin with, all under apache-2.0: parameters, accuracy on ImageNet in percent (timm's
# results/results-imagenet.csv), and images per second of a training step (timm's
# results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv).
FIRST = {
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": ("5.7 M", "75.5%", "2,300"),
    "vit_small_patch32_224.augreg_in21k_ft_in1k": ("22.9 M", "76.0%", "4,400"),
    "vit_base_patch32_224.augreg_in21k_ft_in1k": ("88.2 M", "80.7%", "1,700"),
    "vit_small_patch16_224.augreg_in21k_ft_in1k": ("22.1 M", "81.4%", "1,100"),
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": ("86.6 M", "85.1%", "390"),
    "vit_large_patch16_224.augreg_in21k_ft_in1k": ("304.3 M", "85.9%", "120"),
}
MIDDLE = "vit_small_patch16_224.augreg_in21k_ft_in1k"  # accurate, and small enough to train on a CPU
RESEARCH_ONLY = {"apple-amlr", "seer-license"}  # in addition to licences with "nc" or "noncommercial" in their name


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="word", help="part of the name, or a pattern with * or ?")
    parser.add_argument("-all", action="store_true", help=f"list all matches, even more than {LIMIT}")
    arguments = parser.parse_args(argv)
    if not (arguments.words or arguments.all):
        rows = [(name, *figures) for name, figures in FIRST.items()]
        print("\n".join(align([("name", "parameters", "ImageNet top-1", "images/s"), *rows])))
        print("\nfigures measured by timm; images/s: training in half precision on an RTX 3090, for comparison")
        print(f"to find other models, give words from their names, or -all; see -h\n{train(MIDDLE)}")
        return 0
    names = find_names(arguments.words)
    models = describe_models(names if arguments.all else names[:LIMIT])
    print("\n".join(align([HEADER, *map(row_of, models)])))
    print("\n".join(notes(models, len(names) - len(models))))
    return 0


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
        return bool(re.search(r"\bnc\b|noncommercial|non-commercial", self.licence)) or self.licence in RESEARCH_ONLY


def find_names(words: Sequence[str]) -> list[str]:
    """Return the names of timm's pretrained weights that match all words, or of architectures if no weights match.

    A word is a part of the name, or a pattern with * or ? for the whole name, with or without its tag.
    """
    import timm

    names = sorted(timm.list_pretrained())
    if found := matching(names, words) or matching(timm.list_models(), words):
        return found
    for word in words:
        if not matching(names, [word]):
            parts = {part for name in names for part in (name.partition(".")[0], *re.split(r"[._]", name))}
            raise ConfigError(f"{word}: timm has no model with this in its name{did_you_mean(word, sorted(parts))}")
    raise ConfigError(f"{' '.join(words)}: no name matches all of these words; leave one of them out")


def matching(names: Iterable[str], words: Sequence[str]) -> list[str]:
    """Return the names that match. Names that begin with the first word come first: vit_tiny before crossvit_tiny."""

    def matches(name: str, word: str) -> bool:
        if not set(word) & set("*?["):
            return word in name
        return fnmatch.fnmatchcase(name, word) or fnmatch.fnmatchcase(name.partition(".")[0], word)

    found = [name for name in names if all(matches(name.lower(), word.lower()) for word in words)]
    return sorted(found, key=lambda name: not name.lower().startswith(words[0].lower())) if words else found


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
            if function is torch.Tensor.item and tensor.is_meta:  # timm 1.0.20 reads its drop-path rates with item()
                return 0.0
            return function(*args, **kwargs or {})

    with torch.device("meta"), WithoutInitialValues():
        model = timm.create_model(name, pretrained=False)
    return sum(parameter.numel() for parameter in model.parameters())


def row_of(model: Model) -> tuple[str, ...]:
    """Return the table cells of a model, in the order of HEADER."""
    mark = "  NON-COMMERCIAL" if model.is_non_commercial else ""
    return (
        model.name,
        f"{model.parameters / 1e6:,.1f} M",
        "x".join(map(str, dict.fromkeys(model.size))),
        f"{model.classes:,}" if model.classes else "none",
        f"{model.licence or 'unknown'}{mark}" if model.has_weights else "no weights",
    )


def notes(models: list[Model], num_more: int) -> list[str]:
    """Return the lines below the table: the number of models left out, licences, and the next command."""
    lines = ["", f"{num_more:,} more match; give more words, or -all to list all"] if num_more else [""]
    lines.append("NON-COMMERCIAL licences forbid commercial use; read the other licences before commercial use too")
    with_weights = [each for each in models if each.has_weights]
    if with_weights:  # the smallest, since a beginner should not start with a billion parameters
        return [*lines, train(min(with_weights, key=lambda each: (each.is_non_commercial, each.parameters)).name)]
    words = ("-cfg", "configs/timm.yaml", "-data_path", "FOLDER", "-opts", f"MODEL.NAME={models[0].name}")
    return [*lines, f"train one: {command('main_single_gpu.py', *words)}"]


def train(weights: str) -> str:
    """Return the line with the command that fine-tunes these weights."""
    return f"train one: {command('main_single_gpu.py', '-pretrained', weights, '-data_path', 'FOLDER')}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
