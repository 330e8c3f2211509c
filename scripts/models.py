"""Lists timm's models with accuracy on ImageNet, size and licence, or chooses among weights by your own images.

    halfstep models                         # six models to choose from, with accuracy and speed
    halfstep models dinov3                  # models with this word in their names
    halfstep models vit_small in21k         # models with all of these words in their names
    halfstep models 'convnext*' -all        # all models whose whole name matches this pattern
    halfstep models -data_path photos       # how good six models are for these images, and how long they train
    halfstep models -data_path photos vit_small_patch16_224@160 mine.safetensors 'convnext*' -budget 20m

Architectures without weights are listed only if no weights match. The name says which images the weights were trained
on: in21k_ft_in1k is ImageNet-21k, then ImageNet-1k. Weights that may not be used commercially are marked. Read the
licence of the weights before you use them, even if the list says "unknown".

With -data_path, each word is a candidate: a name, a file, or a pattern (at most six of its matches), with @PIXELS for
another image size. A linear model of the features of each is scored, and a few updates are timed. Nothing is trained.
-output keeps the results, so a second call computes only new candidates, and gets choice.json and choice.png.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from engine.catalogue import Model, describe_models, figures, find_names, licence_text
from scripts.command_line import Parser, check_writable
from scripts.predict import make_folder
from utils.commands import command
from utils.errors import ConfigError, naming_output
from utils.text import align

LIMIT = 60  # maximum number of rows without -all; this many take a few seconds
HEADER = ("name", "ImageNet top-1", "parameters", "image", "classes", "licence")
# {model to begin with: millions of parameters}. All are under apache-2.0.
FIRST = {
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": "5.7 M",
    "vit_small_patch32_224.augreg_in21k_ft_in1k": "22.9 M",
    "vit_base_patch32_224.augreg_in21k_ft_in1k": "88.2 M",
    "vit_small_patch16_224.augreg_in21k_ft_in1k": "22.1 M",
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": "86.6 M",
    "vit_large_patch16_224.augreg_in21k_ft_in1k": "304.3 M",
}
MIDDLE = "vit_small_patch16_224.augreg_in21k_ft_in1k"  # accurate, and small enough to train on a CPU
OF_CANDIDATES = {
    "MODEL.PRETRAINED": "name the candidates as words",
    "DATA.IMAGE_SIZE": "append @PIXELS to candidates, or use -image_size",
    "TRAIN.BUDGET": "use -budget",
}
OF_A_RUN = "data_path dataset cfg image_size batch_size epochs device amp".split()  # flags that the fine-tuning gets


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.data_path or arguments.dataset:
        return choose(arguments)
    if not (arguments.words or arguments.all):
        rows = [(name, size, *cells_of(name)) for name, size in FIRST.items()]
        print("\n".join(align([("name", "parameters", "ImageNet top-1", "images/s"), *rows])))
        print("\nfigures measured by timm; images/s: predictions in half precision on an RTX 4090, for comparison")
        print(f"to find other models, give words from their names, or -all; see -h\n{train(MIDDLE)}")
        print(f"to let your images choose: {command('models', '-data_path', 'FOLDER')}")
        return 0
    names = find_names(arguments.words)
    models = describe_models(names if arguments.all else names[:LIMIT])
    print("\n".join(align([HEADER, *map(row_of, models)])))
    print("\n".join(notes(models, len(names) - len(models))))
    return 0


def parse(argv: list[str]) -> Namespace:
    parser = Parser(__doc__, "models")
    parser.add_argument("words", nargs="*", metavar="word", help="part of the name, or a pattern with * or ?")
    parser.add_argument("-all", action="store_true", help=f"list all matches, even more than {LIMIT}")
    add = parser.add_argument_group("choose by images").add_argument
    add("-data_path", metavar="PATH", help="the images of the fine-tuning")
    add("-budget", metavar="TIME", help="mark candidates whose fine-tuning takes longer, for example 20m")
    add("-output", "-o", "-out", type=Path, metavar="FOLDER", help="folder for the files [output/choice]")
    add("-json", type=Path, metavar="FILE", help="also write the table to this file")
    add = parser.add_argument_group("flags of the fine-tuning").add_argument
    add("-dataset", metavar="NAME", help="the kind of data, for example csv [imagefolder]")
    add("-cfg", metavar="FILE", help="settings file [configs/finetune*.yaml]")
    add("-image_size", metavar="PIXELS", help="side of square images, or HEIGHTxWIDTH [that of each candidate]")
    add("-batch_size", metavar="N|auto", help="images per update [32]")
    add("-epochs", metavar="N", help="number of epochs [30]")
    add("-device", metavar="NAME", help="device to use [auto]")
    add("-amp", nargs="?", const="true", metavar="false|auto", help="compute in half precision")
    add("-opts", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="single settings of the fine-tuning")
    arguments = parser.parse_intermixed_args(argv)
    chooses = arguments.data_path or arguments.dataset  # some data sets need no path
    if chooses and arguments.all:
        raise ConfigError("-all has no effect with -data_path; leave it out")
    for name in ("budget", "output", "json", "opts", *OF_A_RUN):
        if getattr(arguments, name) and not chooses:
            raise ConfigError(f"-{name} has no effect without -data_path; leave it out")
    for name, instead in OF_CANDIDATES.items():
        if any(word.startswith(f"{name}=") for word in arguments.opts):
            raise ConfigError(f"-opts: leave {name} out; {instead}")
    return arguments


def choose(arguments: Namespace) -> int:
    """Let the images choose among the candidates, print the table, and write it with a picture."""
    from configs.schema import to_seconds
    from engine.choice.candidates import Candidate, with_newest_run
    from engine.choice.choose import FOLDER, best_of
    from engine.choice.choose import choose as choose_weights
    from engine.report.choice import lines_of, picture_of
    from engine.settings import CHOOSE, load_settings
    from engine.settings_of_weights import fine_tuning_file
    from models.weights.files import find_file
    from utils.distributed import Process
    from utils.files import replacing, write_text
    from utils.runs import CHOICE

    budget = to_seconds(arguments.budget or "")
    if arguments.budget and not budget:
        raise ConfigError(f"-budget: {arguments.budget} is not a length of time; write for example 20m or 1h30m")
    flags = flags_of(arguments)
    config = load_settings(["-pretrained", CHOOSE, *flags]).config
    for flag, is_set in (("-check", config.CHECK), ("-resume", config.MODEL.RESUME)):
        if is_set:
            raise ConfigError(f"{flag}: the candidates of a choice start new runs; leave {flag} out")
    folder = arguments.output or Path(config.SAVE, FOLDER)
    if arguments.json:
        check_writable("-json", arguments.json)
    make_folder("-output", folder)
    candidate_names = with_newest_run(arguments.words, config.SAVE)
    process = Process.alone(config.DEVICE)
    record = choose_weights(flags, candidate_names, folder, process, print, lambda: budget)
    print("\n".join(["", *lines_of(record)]))
    picture, table = folder / "choice.png", json.dumps(record, indent=2) + "\n"
    with naming_output(folder):
        write_text(folder / CHOICE, table, shared=True)  # other choices may write to this folder now
        with replacing(picture, shared=True) as file:
            file.write(picture_of(record))
    if arguments.json:
        with naming_output(arguments.json, "-json"):
            write_text(arguments.json, table)
    print(f"a picture: {picture}")
    best = best_of(record["candidates"])
    arguments.image_size = best["image_size"] or arguments.image_size
    # Without -cfg, a run that starts from the weights of a run has the settings of that run.
    if find_file(best["name"]) and not arguments.cfg:
        chosen = load_settings(flags, Candidate(best["name"], best["image_size"]).settings).config
        arguments.cfg = f"configs/{fine_tuning_file(chosen)}.yaml"
    limit = ["-budget", arguments.budget] if budget else []
    print(f"train it: {command('train', '-pretrained', best['name'], *limit, *flags_of(arguments))}")
    return 0


def flags_of(arguments: Namespace) -> list[str]:
    """Return the flags of the fine-tuning, in the form that the training programs take."""
    values = {name: getattr(arguments, name) for name in OF_A_RUN}
    flags = [str(word) for name, value in values.items() if value for word in (f"-{name}", value)]
    return flags + (["-opts", *arguments.opts] if arguments.opts else [])


def cells_of(name: str) -> tuple[str, str]:
    """Return accuracy and speed as text, or '-' if timm has not measured these weights."""
    known = figures().get(name)
    return (f"{known.top1:.1f}%", f"{known.speed:,.0f}") if known else ("-", "-")


def row_of(model: Model) -> tuple[str, ...]:
    """Return the table cells of a model, in the order of HEADER."""
    return (
        model.name,
        cells_of(model.name)[0],
        f"{model.parameters / 1e6:,.1f} M",
        "x".join(map(str, dict.fromkeys(model.size))),
        f"{model.classes:,}" if model.classes else "none",
        licence_text(model.licence) if model.has_weights else "no weights",
    )


def notes(models: list[Model], num_more: int) -> list[str]:
    """Return the lines below the table: the number of models left out, licences, and the next command."""
    lines = ["", f"{num_more:,} more match; give more words, or -all to list all"] if num_more else [""]
    lines.append("NON-COMMERCIAL licences forbid commercial use; read the other licences before commercial use too")
    with_weights = [model for model in models if model.has_weights]
    if with_weights:  # the smallest, since a beginner should not start with a billion parameters
        smallest = min(with_weights, key=lambda model: (model.is_non_commercial, model.parameters))
        return [*lines, train(smallest.name)]
    words = ("-cfg", "configs/timm.yaml", "-data_path", "FOLDER", "-opts", f"MODEL.NAME={models[0].name}")
    return [*lines, f"train one: {command('train', *words)}"]


def train(weights: str) -> str:
    """Return the line with the command that fine-tunes these weights."""
    return f"train one: {command('train', '-pretrained', weights, '-data_path', 'FOLDER')}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
