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
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from scripts.command_line import Parser, check_writable
from utils.errors import ConfigError, cause_of
from utils.files import write_text
from utils.program import exit_code
from utils.text import align, counted

if TYPE_CHECKING:
    from models.pretrained.catalogue import KnownModel

LIMIT = 60  # rows without -all: a few seconds
HEADER = ("name", "parameters", "image", "mean, std", "classes", "data", "licence")
COLUMNS = "name,parameters,height,width,mean,std,classes,data,licence,non_commercial,has_weights".split(",")
USUAL = {
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)): "ImageNet",
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)): "CLIP",
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)): "0.5",
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="word", help="part of the name, or a pattern with * or ?")
    parser.add_argument("-without_weights", action="store_true", help="also architectures that timm has no weights of")
    parser.add_argument("-all", action="store_true", help=f"list all that match, also more than {LIMIT}")
    parser.add_argument("-csv", type=Path, metavar="FILE", help="write the table to a file, instead of printing it")
    arguments = parser.parse_args(argv)
    # Not above: it imports torch, which -h does not need.
    from models.pretrained.catalogue import describe_models, find_names

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


def row_of(model: "KnownModel") -> tuple[str, ...]:
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


def notes(models: "list[KnownModel]", num_more: int) -> list[str]:
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


def as_csv(models: "list[KnownModel]") -> str:
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


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
