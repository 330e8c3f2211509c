"""Predicts the class or the numbers of images with a run, an exported graph, or any weights that -pretrained reads.

    halfstep predict output/train-20260102-03-04-05 photo.jpg more_photos/ -top 3 -csv classes.csv
    halfstep predict output/train-20260102-03-04-05 'photos/**/*.jpg' -sheet photos.png -attention maps
    halfstep predict output/train-20260102-03-04-05 new_photos -into sorted -unsure 0.6
    halfstep predict output/train-20260102-03-04-05 new_photos -into sorted -unknown 0.95
    halfstep predict vit_base_patch16_224 -list files.txt -json classes.json

Prints a line for each image: its path, class and probability (0 to 1), and with -top the next classes, separated by
tabs. If an image can have several labels, it prints all labels with a probability above 0.5, or -top of them. A model
of numbers prints each number with its interval; -top, -into, -unsure and -unknown need classes. A folder means all
images in it and its subfolders; @FILE means the images that a file lists. Unreadable images are reported on stderr; the
others are predicted, and the exit code is 2.
"""

import argparse
import glob
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code, exit_now  # isort: skip
from engine.predict.output_paths import DOCUMENT, PICTURE, SHEET_ENDINGS, TABLE, Outputs, sheet_paths
from scripts.command_line import CHECKPOINT_HELP, Parser, at_least, check_no_input, check_writable, image_size
from utils.errors import ConfigError
from utils.files import read_names, refuse_other_kind
from utils.launch import find_launched_rank
from utils.runs import LATEST
from utils.text import counted, first_of

if TYPE_CHECKING:
    from configs.tables import TaskRow
    from engine.predict.classifier import Classifier
    from engine.predict.output import Mark, Output
    from engine.predict.predictor import Predictor
    from utils.distributed import Process

MODEL_HELP = (
    f"{CHECKPOINT_HELP}, weights of timm, PaddleViT, Google or torchvision, a folder of the Hugging Face hub, or the "
    "name of a timm model"
)
IMAGES_A_PROCESS = 500  # classifying fewer images takes less time than starting another process
STDIN = "-"


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    from utils.distributed import Process  # local: importing torch takes seconds
    from utils.host import find_devices

    def images() -> list[str]:
        paths = find_images(arguments.images, arguments.list, outputs_of(arguments))
        check_outputs(arguments, paths)
        return paths

    if launched := find_launched_rank(os.environ):
        process = Process.start(arguments.device, launched)
        try:
            code = predict(arguments, process.first(images), process)
            process.close()
        except Exception as error:
            explained = process.name_lost_ranks(error)
            raise explained from (None if explained is error else error)
        return code
    number, paths = arguments.ngpus, None
    if number in (None, 1):
        paths = images()
        kind, count = find_devices(arguments.device)
        fits = 1 if STDIN in arguments.list else -(-len(paths) // IMAGES_A_PROCESS)
        number = number or (1 if kind == "cpu" else min(count, fits))
    if number > 1:
        from utils.launch import launch

        return launch(__file__, argv, number)
    return predict(arguments, paths, Process.alone(arguments.device))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, "predict")
    parser.add_argument("model", help=f"an exported graph (.onnx), or {MODEL_HELP}")
    parser.add_argument("images", nargs="*", metavar="image", help="a file, a folder, a pattern in quotes, or @FILE")
    list_help = "a file with one image per line; - is stdin"
    parser.add_argument("-list", action="append", default=[], metavar="FILE", help=list_help)
    parser.add_argument("-top", type=at_least(1), metavar="N", help="classes to print for each image [1]")
    add = parser.add_argument_group("output").add_argument
    add("-csv", type=Path, metavar="FILE", help="also write a table with one row per image")
    add("-json", type=Path, metavar="FILE", help="also write the table, the model and its preprocessing as JSON")
    add("-sheet", type=Path, metavar="FILE", help="also draw thumbnails with their predictions, .png or .jpg")
    add("-attention", type=Path, metavar="FOLDER", help="also draw a map of the model's attention for each image")
    add("-into", type=Path, metavar="FOLDER", help="also copy each image into the folder of its class in FOLDER")
    add("-unsure", type=float, metavar="P", help="mark images whose class has a probability below P")
    unknown_help = "mark images unlike the validation images, or too unsure for a share P of right answers (0.95)"
    add("-unknown", type=float, metavar="P", help=unknown_help)
    ngpus_help = f"number of processes [one per GPU, if there are {IMAGES_A_PROCESS} images for each]"
    add = add_model_flags(parser, ngpus_help)
    add("-classes", type=Path, metavar="FILE", help="names of the classes, one per line")
    add("-flip", action="store_true", help="use the mean of the logits of each image and its mirror image")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.unsure is not None and not 0 <= arguments.unsure <= 1:
        raise ConfigError(f"-unsure: {arguments.unsure} is not a probability; give a number from 0 to 1")
    if arguments.unknown is not None and not 0 < arguments.unknown < 1:
        raise ConfigError(f"-unknown: {arguments.unknown} is not between 0 and 1; give a share such as 0.95")
    if None not in (arguments.unsure, arguments.unknown):
        raise ConfigError("-unsure, -unknown: both mark images with a low probability; leave one of them out")
    return arguments


def add_model_flags(parser: Parser, ngpus_help: str) -> Callable:
    """Add the flags for the model and for computing. Return the function that adds more flags for the model."""
    add = add_for_model = parser.add_argument_group("model").add_argument
    add("-raw", action="store_true", help="use the raw weights even if the EMA scored better")
    add("-cfg", metavar="FILE", help="settings of the model, if its weights do not have them")
    size_help = "side of a square input image, or HEIGHTxWIDTH [that of the weights]"
    add("-image_size", type=image_size, metavar="PIXELS", help=size_help)
    opts_help = "single settings, as in MODEL.NAME=resnet50"
    add("-opts", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=opts_help)
    add = parser.add_argument_group("computing").add_argument
    amp_help = "compute in half precision: faster, but a few answers differ"
    add("-amp", nargs="?", const="true", type=amp_of_prediction, metavar="false", help=amp_help)
    add("-batch_size", type=at_least(1), metavar="N", help="images per batch [as in the run's evaluation]")
    add("-device", default="auto", choices=["auto", "cuda", "xpu", "mps", "cpu"], help="device to use [auto]")
    add("-ngpus", type=at_least(1), metavar="N", help=ngpus_help)
    return add_for_model


def amp_of_prediction(amp: str) -> str:
    """Return a value of AMP. Raise ConfigError for auto."""
    if amp.lower() == "auto":
        raise ConfigError("-amp auto: it times updates of a training, and here are none; give -amp, or leave it out")
    return amp


def settings_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags that override settings of the model, in the form that the training programs take."""
    for option in arguments.opts:
        key, _, text = option.partition("=")
        if key.strip() == "AMP":
            amp_of_prediction(text.strip())
    values = {"-cfg": arguments.cfg, "-amp": arguments.amp, "-batch_size_eval": arguments.batch_size}
    values["-image_size"] = arguments.image_size
    flags = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    return flags + (["-opts", *arguments.opts] if arguments.opts else [])


def find_images(names: Iterable[str], lists: Iterable[str], outputs: Outputs) -> list[str]:
    """Return the images `names` on the command line, where @FILE is a list, and then the images in `lists`."""
    paths = []
    for name in names:
        is_list = name.startswith("@") and not os.path.exists(name)
        paths += read_list_of_photos(name[1:], outputs) if is_list else expand(name, outputs)
    for name in lists:
        paths += read_list_of_photos(name, outputs)
    if not paths:
        raise ConfigError("no images; name files, folders, patterns such as 'photos/*.jpg', or a list with -list FILE")
    return paths


def expand(name: str, outputs: Outputs) -> list[str]:
    """Return a file, the images in and below a folder, or the matches of a pattern; 2.jpg comes before 10.jpg."""
    from datasets.sources.folder import images_for_any_model
    from datasets.sources.images import natural

    if os.path.isdir(name):
        images = images_for_any_model(Path(name), report)
        return outputs.without([os.path.normpath(os.path.join(name, each)) for each in images], name, report)
    if os.path.exists(name):  # even if the file's name looks like a pattern
        return [name]
    if not glob.has_magic(name):
        remedy = "name the model before the images" if name == LATEST else "quote a name that has spaces"
        raise ConfigError(f"{name}: no such image or folder; {remedy}")
    matches = sorted(glob.glob(name, recursive=True), key=natural)
    if not matches:
        raise ConfigError(f"{name}: no file matches this pattern; check the folder and the ending in it")
    if "**" in name:  # this pattern matches folders as well as the files in them
        matches = [each for each in matches if not os.path.isdir(each)]
    start = os.path.dirname(name[: re.search(r"[*?[]", name).start()])
    matches = outputs.without(matches, start or os.curdir, report)
    return [path for each in matches for path in expand(each, outputs)]


def read_list_of_photos(name: str, outputs: Outputs) -> list[str]:
    """Return the images that a file names, one path, folder or pattern per line. `-` is the standard input."""
    try:
        text = sys.stdin.read() if name == STDIN else read_names(Path(name))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"-list: cannot read {name} ({error}); it must be a text file with one path per line"
        ) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    missing = [line for line in lines if not os.path.exists(line) and not glob.has_magic(line)]
    if missing:
        raise ConfigError(
            f"-list: {len(missing)} of {len(lines)} paths in {name} do not exist: {first_of(missing, limit=3)}; they "
            f"are relative to the current folder, {os.getcwd()}"
        )
    if not lines:
        raise ConfigError(f"-list: {name} names no images; it must have one path per line")
    return [path for line in lines for path in expand(line, outputs)]


def outputs_of(arguments: argparse.Namespace) -> Outputs:
    return Outputs(arguments.csv, arguments.json, arguments.sheet, arguments.into, arguments.attention)


def check_outputs(arguments: argparse.Namespace, paths: list[str]) -> None:
    """Raise ConfigError if an output cannot be written or would overwrite an image. Call this before predicting."""
    inputs = (*arguments.list, arguments.classes, arguments.cfg)
    outputs = files_to_write(outputs_of(arguments), len(paths), arguments.model, inputs)
    if arguments.attention:
        from engine.predict.attention_maps import map_names

        names = map_names(paths)
        make_folder("-attention", arguments.attention)
        outputs |= {arguments.attention / name: "-attention" for name in names}
    if arguments.into:
        make_folder("-into", arguments.into)
    images = {os.path.realpath(path) for path in paths} if outputs else set()
    for path, flag in outputs.items():
        if os.path.realpath(path) in images:
            raise ConfigError(f"{flag}: {path} is one of the images and would be overwritten; choose another place")
    refuse_other_outputs(outputs)


def refuse_other_outputs(outputs: dict[Path, str]) -> None:
    """Raise ConfigError if an output {path: flag} would replace a file that this script did not write."""
    for path, flag in outputs.items():
        place = "folder" if flag == "-attention" else "file"
        refuse_other_kind(flag, path, {"-csv": TABLE, "-json": DOCUMENT}.get(flag, PICTURE), f"name another {place}")


def files_to_write(
    outputs: Outputs, num_images: int, model: str, inputs: Iterable[str | Path | None]
) -> dict[Path, str]:
    """Return {file: its flag} for the tables and sheets, and check their names.

    `inputs`: further files that are read.
    """
    from models.weights.files import find_file

    sources = [model, find_file(model), *inputs]
    files: dict[Path, str] = {}
    for flag, path in (("-csv", outputs.csv), ("-json", outputs.json), ("-sheet", outputs.sheet)):
        if not path:
            continue
        check_writable(flag, path)
        check_no_input(flag, path, filter(None, sources))
        if flag == "-sheet" and path.suffix.lower() not in SHEET_ENDINGS:
            raise ConfigError(f"-sheet: {path} must end in one of {', '.join(SHEET_ENDINGS)}")
        if path in files:
            raise ConfigError(f"{flag}: {path} is written by {files[path]} too; name another file")
        files |= {each: flag for each in (sheet_paths(path, num_images) if flag == "-sheet" else [path])}
    return files


def make_folder(flag: str, folder: Path) -> None:
    """Make a folder for pictures. Raise ConfigError if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot make the folder {folder} ({error}); choose another") from None
    check_writable(flag, folder / "map.png")


def predict(arguments: argparse.Namespace, paths: list[str], process: "Process") -> int:
    """Print the most probable classes of each image, and write the files that the flags name. Return the exit code."""
    from datasets.pixels.kinds import pixels_of
    from datasets.sources.folder import images_among
    from engine.export.runtime import load_exported
    from engine.predict.classifier import load_classifier
    from engine.predict.output import Output, thumbnails
    from engine.predict.predictor import Predictor

    how = (arguments.model, settings_flags(arguments), arguments.raw, arguments.classes)
    classifier = process.after_first(lambda: load_classifier(*how, load_graph=load_exported))
    pixels = pixels_of(classifier.config.DATA)
    paths = images_among(paths, pixels, report if process.is_first else len)
    maps = None
    if arguments.attention:
        from engine.predict.attention_maps import Maps

        maps = process.after_first(lambda: Maps.of(classifier, process.device, arguments.attention, paths))
    refuse_flags_of_classes(arguments, classifier.config.task)
    make = Predictor
    if classifier.takes_photo:
        from engine.export.runtime import PhotoPredictor as make
    predictor = make(classifier, process, arguments.flip, report)
    if process.is_first:
        report_model(predictor)

    mark = mark_of(arguments, classifier, process.is_first)

    def look(batch) -> list:
        if maps:
            maps.write(batch)
        return thumbnails(batch) if arguments.sheet else [None] * len(batch.indices)

    may_stop = process.world_size == 1 and not maps
    output = Output(paths, outputs_of(arguments), classifier.classes, process.is_first, may_stop, mark)
    for prediction in predictor(paths, arguments.top, look if maps or arguments.sheet else None):
        output.add(prediction)
    process.first(lambda: output.close(classifier.facts()))
    if process.is_first:
        report_end(arguments, output)
    return 2 if output.num_unreadable else 0


def refuse_flags_of_classes(arguments: argparse.Namespace, task: "TaskRow") -> None:
    """Raise ConfigError for flags that need one class for each image, if the model has no such classes."""
    for flag in task.not_predicted:
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"-{flag}: {task.why_not_predicted}; leave -{flag} out")


def report_model(predictor: "Predictor") -> None:
    """Report the weights, the device, and what intervals of numbers mean."""
    classifier, process = predictor.classifier, predictor.process
    several = "" if process.world_size == 1 else f", {counted(process.world_size, 'process')}"
    report(f"{classifier.describe()}, on {classifier.runtime or process.device.type}{several}")
    if text := predictor.task.describe_answers(classifier.calibration):
        report(text)


def report_end(arguments: argparse.Namespace, output: "Output") -> None:
    """Report the share of images that -unknown answers, why it marks others, and how many are unreadable."""
    if arguments.unknown is not None and output.num_read:
        marked = output.num_marked
        answered, both = 1 - marked.total() / output.num_read, marked[True, True]
        report(
            f"-unknown {arguments.unknown}: answers {answered:.1%} of {counted(output.num_read, 'image')}; the "
            f"confidence of {marked[True, False] + both} is too low, and {marked[False, True] + both} do not fit the "
            f"validation images ({both} of them both)"
        )
    if output.num_unreadable:
        report(f"{output.num_unreadable} of {counted(len(output.paths), 'image')} could not be read")


def mark_of(arguments: argparse.Namespace, classifier: "Classifier", reports: bool) -> "Mark | None":
    """Return the mark for images with a low probability, or None. If `reports`, print the threshold of -unknown."""
    from engine.predict.output import UNKNOWN, UNSURE, Mark

    if arguments.unknown is not None:
        from engine.confidence.unknown import find_threshold

        say = report if reports else lambda line: None
        return Mark(UNKNOWN, find_threshold(classifier.source, classifier.calibration, arguments.unknown, say))
    return None if arguments.unsure is None else Mark(UNSURE, arguments.unsure)


def report(line: str) -> None:
    """Print to stderr, so that stdout has only predictions and can be piped."""
    print(line, file=sys.stderr)


if __name__ == "__main__":
    exit_now(exit_code(main, sys.argv[1:]))
