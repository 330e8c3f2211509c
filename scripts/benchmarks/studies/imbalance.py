"""Recall of rare classes: digits of which the rarest class has a 50th of the images of the most common one.

python scripts/benchmarks/studies/imbalance.py

Trains configs/vit_digits.yaml plainly, with DATA.SAMPLER=balanced and with TRAIN.CLASS_WEIGHTS=auto. Class k of the digits' own
training images keeps 140 x 50 ** (-k / 9), at least 3; which digit is class k, and which of its images stay, is drawn for each
seed, the same for all ways to train. Recall is measured on the 359 validation images, of which every class has as many.
Exit code 1 if one of the remedies does not raise the mean recall by more than two standard errors of its differences.
"""

import contextlib
import csv
import io
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that the script runs from any folder

import numpy as np

import main_single_gpu
from configs.load import load
from datasets import ImageSet, load_image_sets
from scripts import predict
from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.command_line import Parser, at_least
from utils.program import exit_code

RECIPE = str(ROOT / "configs/vit_digits.yaml")
WAYS = {
    "plain": (),
    "balanced sampler": ("DATA.SAMPLER=balanced",),
    "class weights": ("TRAIN.CLASS_WEIGHTS=auto",),
}
MUST_HELP = ("balanced sampler", "class weights")
MOST, RATIO, LEAST = 140, 50, 3  # images of a class
NUM_RARE = 4  # classes, whose recall is told beside that of all

Recalls = tuple[float, float]  # means over all classes and over the rare ones, percent


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-seeds", type=at_least(2), default=5, metavar="N", help="how many, from 0 [5]")
    parser.add_argument("-epochs", type=at_least(1), default=60, metavar="N", help="of each run [60]")
    arguments = parser.parse_args(argv)
    found: dict[str, list[Recalls]] = {name: [] for name in WAYS}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            rare = write_images(Path(folder), seed)
            for name, options in WAYS.items():
                found[name].append(train(Path(folder), rare, seed, arguments.epochs, options))
                print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(tabulate(found, f"{arguments.seeds} seeds, {arguments.epochs} epochs. {machine('cpu')}").markdown())
    return int(any(gain(found, name)[0] <= 2 * gain(found, name)[1] for name in MUST_HELP))


def write_images(folder: Path, seed: int) -> list[str]:
    """train/ and val/ with a folder of PNGs for each class. Returns the rare classes."""
    rng = np.random.default_rng(seed)
    digits = rng.permutation(10)
    train, val = load_image_sets(load(["-cfg", RECIPE]).config)
    kept = []
    for number, digit in enumerate(digits):
        count = max(LEAST, round(MOST * RATIO ** (-number / (len(digits) - 1))))
        kept.append(rng.permutation(np.flatnonzero(train.targets == digit))[:count])
    write(folder / "train", train, np.concatenate(kept))
    write(folder / "val", val, range(len(val)))
    return [str(digit) for digit in digits[-NUM_RARE:]]


def write(folder: Path, images: ImageSet, indices: Sequence[int]) -> None:
    for index in map(int, indices):
        ending, content = images.file(index)
        path = folder / images.classes[images.targets[index]] / f"{index}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def train(folder: Path, rare: list[str], seed: int, epochs: int, options: Sequence[str]) -> Recalls:
    """One run by the entry script, and what its last weights say of the validation images."""
    with tempfile.TemporaryDirectory() as output:
        words = ["-cfg", RECIPE, "-dataset", "imagefolder", "-data_path", folder, "-seed", seed]
        words += ["-epochs", epochs, "-output", output, "-num_workers", 0, "-opts", "TENSORBOARD=false", *options]
        call(main_single_gpu.main, *words, f"VALIDATE_FREQ={epochs}", f"SAVE_FREQ={epochs}", "DEVICE=cpu")
        (last,) = Path(output).glob("*/last.pth")
        table = Path(output) / "classes.csv"
        call(predict.main, last, folder / "val", "-csv", table)
        right = defaultdict(list)
        with open(table, newline="") as rows:
            for row in csv.DictReader(rows):
                truth = Path(row["image_path"]).parent.name
                right[truth].append(row["class"] == truth)
    recall = {name: 100 * statistics.mean(values) for name, values in right.items()}
    return statistics.mean(recall.values()), statistics.mean(recall[name] for name in rare)


def call(program: Callable[[list[str]], int], *words: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = program(list(map(str, words)))
    assert code == 0, words


def gain(found: dict[str, list[Recalls]], name: str) -> tuple[float, float]:
    """By how much a way to train raises the recall of all classes, seed against seed: mean and standard error."""
    differences = [own[0] - plain[0] for own, plain in zip(found[name], found["plain"], strict=True)]
    return statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def tabulate(found: dict[str, list[Recalls]], title: str) -> Table:
    rows = []
    for name, runs in found.items():
        all_classes, rare = zip(*runs, strict=True)
        figures = [f"{statistics.mean(each):.1f} +- {statistics.stdev(each):.1f}" for each in (all_classes, rare)]
        mean, error = gain(found, name)
        rows.append([name, *figures, "-" if name == "plain" else f"{mean:+.1f} +- {error:.1f}"])
    columns = ["", "macro recall, %", f"of the {NUM_RARE} rarest classes", "gain, +- standard error"]
    return Table(title, columns, rows)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
