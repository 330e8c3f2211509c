"""Classifies images with a checkpoint of a run, which contains the preprocessing and the class names.

    python scripts/predict.py output/train-20260102-03-04-05 photo.jpg more_photos/ -top 3 -csv classes.csv

Prints a line for each image: its path, class and probability (0 to 1), and with -top the next classes, separated by
tabs. Where an image can have several labels, it prints all with a probability above 0.5, or as many as -top says. A folder means all images in it and below it. Unreadable images are reported on stderr; the others are classified,
and the exit code is 2.
"""

import csv
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

import torch

from configs.schema import Config
from configs.values import unflatten
from datasets import BadImages, Normalize, build_eval_data
from datasets.sources.folder import FolderScan, describe_left_out
from datasets.sources.images import FileImages
from datasets.transforms.decode import KNOWN_ENDINGS
from datasets.transforms.pixel_rules import PixelRules
from engine.loss.classification import widen
from engine.precision.policy import Precision, set_matmul
from models import build_model
from models.formats.adapters import merged
from models.formats.common import weights_of
from models.pretrained.weights import load_exactly
from scripts.command_line import CHECKPOINT_HELP, Parser, at_least, check_writable, read_checkpoint
from utils.distributed import Process, choose_device
from utils.errors import ConfigError
from utils.files import write_text
from utils.program import exit_code, nobody_reads
from utils.text import counted

FEW = 64  # images that are read faster than workers start
COLUMNS = ("image_path", "rank", "class", "probability")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help=CHECKPOINT_HELP)
    parser.add_argument("images", nargs="+", metavar="image", help="an image file, or a folder of them")
    parser.add_argument("-top", type=at_least(1), metavar="N", help="classes to print for each image [1]")
    parser.add_argument("-csv", type=Path, metavar="FILE", help=f"also write a table: {','.join(COLUMNS)}")
    parser.add_argument("-raw", action="store_true", help="use the raw weights even if the EMA scored better")
    arguments = parser.parse_args(argv)
    if arguments.csv:
        check_writable("-csv", arguments.csv)
    if arguments.csv and arguments.csv.suffix.lower() in KNOWN_ENDINGS:
        raise ConfigError(f"-csv: {arguments.csv} has the name of an image; name the table that is to be written")
    return predict(arguments.checkpoint, find_images(arguments.images), arguments.top, arguments.csv, arguments.raw)


def predict(source: str, paths: list[str], top: int | None, table: Path | None, raw: bool) -> int:
    """Print, and optionally write, the `top` most probable classes of each image; None: its class, or all its labels.

    Returns the exit code.
    """
    predictor = Predictor(source, raw)
    report(predictor.description)
    rows, num_read = [], 0
    for path, guesses in predictor(paths, top):
        num_read += 1
        try:
            print("\t".join([path, *(f"{name}\t{probability:.4f}" for name, probability in guesses)]))
        except BrokenPipeError:  # `| head` has seen enough, but the table is to have all
            if not (table and nobody_reads()):
                raise
        rows += [(path, rank, name, f"{probability:.6f}") for rank, (name, probability) in enumerate(guesses, start=1)]
    if table:
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([COLUMNS, *rows])
        write_text(table, lines.getvalue())
    if num_read < len(paths):
        report(f"{len(paths) - num_read} of {counted(len(paths), 'image')} could not be read")
        return 2
    return 0


def report(line: str) -> None:
    """Print to stderr, so that stdout has only predictions and can be piped."""
    print(line, file=sys.stderr)


def find_images(given: list[str]) -> list[str]:
    """Return the files as given, and the images below each folder, sorted."""
    paths = []
    for path in given:
        if os.path.isdir(path):
            scan = FolderScan(Path(path), [])
            paths += [os.path.normpath(os.path.join(path, inside)) for inside in scan.images_below("")]
            for line in describe_left_out(Path(path), scan.left_out):
                report(line)
        elif os.path.exists(path):
            paths.append(path)
        else:
            raise ConfigError(f"{path}: no such image or folder")
    return paths


class Predictor:
    """A checkpoint's model, with the precision and preprocessing of its run's evaluation."""

    def __init__(self, source: str, raw: bool):
        path, state = read_checkpoint(source, {"config", "class_names", "data"})
        self.classes, self.config = state["class_names"], config_of(state)
        self.device = choose_device("auto", local_rank=0)
        self.precision = Precision(self.config, self.device)
        set_matmul(self.config.PRECISION.MATMUL)
        kind = "state_dict" if raw else weights_of(state, path)[1]
        if kind not in state:
            raise ConfigError(f"-raw: {path} has only the EMA weights")
        model = build_model(self.config, self.config.MODEL.NUM_CLASSES or len(self.classes))
        load_exactly(model, merged(state[kind], state["config"]), path)
        self.precision.transforms().apply(model)
        self.model = self.precision.computing(model.to(self.device)).eval()
        epoch = f" after epoch {state['epoch'] + 1}" if "epoch" in state else ""
        self.description = (
            f"{path} ({kind}): {state['arch']}{epoch}, {counted(len(self.classes), 'class')}, on {self.device.type}"
        )

    def __call__(self, paths: list[str], top: int | None = None) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        """Yield the path of each readable image and its `top` classes with their probabilities; None: as `predict`."""
        config, several = self.config, self.config.DATA.has_several_labels
        if len(paths) <= FEW:
            config = replace(config, DATA=replace(config.DATA, NUM_WORKERS=0))
        # Each image's index is its target, so that a batch tells which images it contains.
        images = FileImages(Path(), paths, range(len(paths)), self.classes, PixelRules.of(config.DATA))
        bad_images = BadImages(images, max_fraction=1.0, say=report)
        normalize = Normalize(config.DATA).to(self.device)
        for batch in build_eval_data(config, images, Process(self.device)):
            bad_images.note(batch.bad)
            if not batch.num_samples:
                continue
            images = normalize(batch.images.to(self.device), self.precision.input_dtype(self.model))
            with torch.no_grad(), self.precision.autocast():
                logits = self.model(images)
            logits = widen(logits)
            most = logits.shape[1] if several else 1
            best = (logits.sigmoid() if several else logits.softmax(1)).topk(min(top or most, logits.shape[1]))
            numbers, probabilities = best.indices.tolist(), best.values.tolist()
            for row, index in enumerate(batch.targets.tolist()):
                names = [self.classes[n] if n < len(self.classes) else f"class {n}" for n in numbers[row]]
                guesses = list(zip(names, probabilities[row], strict=True))
                yield paths[index], [each for each in guesses if top or not several or each[1] > 0.5]


def config_of(state: dict) -> Config:
    """The settings of the run, with the preprocessing that `data` describes."""
    config = unflatten(state["config"])
    data = state["data"]
    channels, side, _ = data["input_size"]
    images = replace(
        config.DATA,
        IMAGE_SIZE=side,
        IMAGE_CHANNELS=channels,
        CROP_PCT=data["crop_pct"],
        CROP_MODE=data.get("crop_mode", "center"),  # older checkpoints have none
        INTERPOLATION=data["interpolation"],
        IMAGENET_MEAN=tuple(data["mean"]),
        IMAGENET_STD=tuple(data["std"]),
    )
    precision = config.PRECISION
    if precision.MODE == "float8":  # needs hardware that is often not there for inference
        precision = replace(precision, MODE="autocast", DTYPE="bfloat16")
    return replace(config, DATA=images, PRECISION=precision)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
