"""Lists timm's models: parameters, image size, licence and the data of their weights. Needs no network.

    python scripts/models.py dinov3                  # with this in their name
    python scripts/models.py vit_small in21k         # with all of these
    python scripts/models.py 'convnext*' -csv convnext.csv
    python scripts/models.py swin -without_weights   # also architectures that timm has no weights of

A pattern with * or ? is compared with the whole name. `mean, std` is how pixels are normalized: ImageNet, CLIP, 0.5, or the
figures. `data` is what the name says of the images that the weights were trained with, the last at the end. Weights that may
not be used commercially are marked; read the licence of each before you use it, also where timm does not know it.
"""

import csv
import difflib
import fnmatch
import io
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from scripts.command_line import Parser, check_writable
from utils.errors import ConfigError, cause_of
from utils.files import write_text
from utils.program import exit_code
from utils.text import align, counted

LIMIT = 60  # rows without -all: a few seconds
HEADER = ("name", "parameters", "image", "mean, std", "classes", "data", "licence")
COLUMNS = "name,parameters,height,width,mean,std,classes,data,licence,non_commercial,has_weights".split(",")
USUAL = {
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)): "ImageNet",
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)): "CLIP",
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)): "0.5",
}


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


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="word", help="part of the name, or a pattern with * or ?")
    parser.add_argument("-without_weights", action="store_true", help="also architectures that timm has no weights of")
    parser.add_argument("-all", action="store_true", help=f"list all that match, also more than {LIMIT}")
    parser.add_argument("-csv", type=Path, metavar="FILE", help="write the table to a file, instead of printing it")
    arguments = parser.parse_args(argv)

    if arguments.csv:
        check_writable("-csv", arguments.csv)
    names = find_names(arguments.words, arguments.without_weights)
    shown = names if arguments.all else names[:LIMIT]
    models = describe_models(shown)
    if arguments.csv:
        try:
            write_text(arguments.csv, as_csv(models))
        except OSError as error:
            raise ConfigError(
                f"-csv: {arguments.csv} cannot be written ({cause_of(error)}); choose another place"
            ) from None
        print(f"{counted(len(models), 'model')}: {arguments.csv}")
    else:
        print("\n".join(align([HEADER, *map(row_of, models)])))
    print("\n".join(notes(models, len(names) - len(shown))))
    return 0


def row_of(model: KnownModel) -> tuple[str, ...]:
    height, width = model.sides
    mark = "  NON-COMMERCIAL" if model.is_non_commercial else ""
    return (
        model.name,
        f"{model.parameters / 1e6:,.1f} M",
        f"{height}" if height == width else f"{height}x{width}",
        USUAL.get((model.mean, model.std)) or f"{_figures(model.mean)}; {_figures(model.std)}",
        f"{model.classes:,}" if model.classes else "none",
        model.data or "-",
        f"{model.licence or 'unknown'}{mark}" if model.has_weights else "no weights",
    )


def _figures(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def notes(models: list[KnownModel], num_more: int) -> list[str]:
    """What is said below the table: what is not in it, licences, and the next command."""
    lines = [f"{num_more:,} more; be more specific, or -all"] if num_more else []
    if forbidden := sorted({each.licence for each in models if each.is_non_commercial}):
        lines.append(f"NON-COMMERCIAL: these may not be used commercially ({', '.join(forbidden)})")
    if special := sorted({each.licence for each in models if each.has_own_terms}):
        lines.append(f"licences with terms of their own, read them before commercial use: {', '.join(special)}")
    chosen = next((each for each in models if each.has_weights), models[0])
    if chosen.has_weights:
        what, settings = "fine-tune one", f"-cfg configs/finetune.yaml -pretrained {chosen.name}"
    else:
        what, settings = "train one from scratch", f"-cfg configs/timm.yaml -opts MODEL.NAME={chosen.name}"
    command, _, more = settings.partition(" -opts ")
    command = f"python main_single_gpu.py {command} -data_path FOLDER -amp{more and f' -opts {more}'}"
    return ["", *lines, f"{what}: {command}"]


def as_csv(models: list[KnownModel]) -> str:
    text = io.StringIO()
    rows = (
        (
            *(each.name, each.parameters, *each.sides, *(" ".join(map(str, part)) for part in (each.mean, each.std))),
            *(each.classes, each.data, each.licence, each.is_non_commercial, each.has_weights),
        )
        for each in models
    )
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    return text.getvalue()


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
    """The number of parameters, of a model that exists in shapes only: no memory, no download, a second for billions."""
    import timm  # these two take seconds
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutInitialValues(TorchFunctionMode):
        """Leaves out what fills tensors without memory: on the meta device that takes four times as long as the rest."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            tensor = args[0] if args else kwargs.get("tensor")
            if function.__name__ in FILLING and isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
            return function(*args, **kwargs)

    with torch.device("meta"), WithoutInitialValues():
        model = timm.create_model(name, pretrained=False)
    return sum(parameter.numel() for parameter in model.parameters())


def data_of(tag: str) -> str:
    """'ImageNet-21k, ImageNet-1k' of augreg_in21k_ft_in1k."""
    return ", ".join(dict.fromkeys(DATA[part] for part in re.split("[_.]", tag) if part in DATA))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
