"""Measures how often the accuracy on other images lies in the 95% interval that a run prints.

    python tests/support/real_sets.py -output real
    python scripts/benchmarks/coverage.py real -output coverage-runs
    python scripts/benchmarks/coverage.py real -output coverage-runs -draws 200 -runs 0 -fold_runs 0

A draw has 100 to 500 of all stamps or of Google's emoji; the other images are its judge, at least 150. In half of the
draws, a tenth of the images has a copy, the same image saved again as JPEG. Of the fonts, a draw has 12 to 24 of 36
families, which are groups; the classes are light, medium and bold.

-draws fits the linear classifier of a run on every fourth feature of EfficientNet-Lite0 at 128 pixels. Split, folds and
intervals are the program's own. "Not looked for" divides the same draws and computes their intervals as if each image
were a group of its own. -runs and -fold_runs train whole runs (5 epochs at 64 pixels) on the first draws of stamps and
emoji: with a tenth held out, and with -folds 5. The judge scores the model that did not learn the tenth, or the model
of all images. Runs that exist are not repeated.

A difference between the printed accuracy and the judge's is covered if it is at most sqrt(a^2 + b^2): a is the distance
from the printed accuracy to the end of its interval on that side, b is half the 95% interval of the judge's accuracy,
by families for fonts. The interval of the coverage is exact (binomial), as if the draws were independent.
"""

import csv
import json
import math
import sys
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np
import torch
from PIL import Image
from scipy.stats import binomtest
from torch.nn import functional

from configs.schema import Config
from datasets.image_set import Table
from datasets.index import Texts
from datasets.sources.images import FileStorage
from datasets.split import split
from engine.evaluation.groups import accuracy_interval, degrees_of, groups_of, standard_error
from engine.evaluation.scores import wilson_interval
from engine.evaluation.student import student
from engine.features.linear import fit_linear
from scripts.benchmarks.accuracy import MODEL, PREDICTIONS, SIDE, WEIGHTS, right_in, start
from scripts.benchmarks.common import ROOT
from scripts.command_line import Parser, at_least
from utils.text import markdown_table

SETS = ("stamps", "emoji")
FONTS = "fonts"
FOLDERS = {"stamps": ("train", "val"), "emoji": ("train",)}  # the judge's emoji in val are of Apple, another style
WEIGHT_NAMES = {300: "light", 500: "medium", 1000: "bold"}  # the largest weight of a font in each class
NUM_FOLDS = 5
FRACTION, FRACTION_OF_FONTS = 0.1, 0.3  # a tenth of 12 to 24 families would be too few for an interval
SMALLEST = 100  # images of a draw
FEWEST_FAMILIES, MOST_FAMILIES = 12, 24
EACH_FEATURE = 4  # every fourth feature: a head on 320 features is fitted in a quarter of the time
MOST_JUDGING = 400  # images that judge a whole run


class Pool(NamedTuple):
    """All images of a set. Draws share them."""

    folder: Path
    paths: list[str]  # CLASS/FILE, below `images` in the folder
    targets: np.ndarray  # int64 [N]
    classes: list[str]
    families: np.ndarray | None  # str [N]: the groups


class Features(NamedTuple):
    """Features of all images of a pool, and of their copies."""

    of_images: np.ndarray  # [N, D]
    of_copies: np.ndarray  # [N, D], or [0, D] if no copies are planted


class Draw(NamedTuple):
    """Images of a pool, as indices."""

    pool: Pool
    number: int
    learned: np.ndarray
    copied: np.ndarray  # of the learned images, those that have a copy too
    judging: np.ndarray


class Figure(NamedTuple):
    """An accuracy as it is printed, and the judge's, all in percent."""

    printed: float
    low: float
    high: float
    judged: float
    half: float  # half the 95% interval of the judge

    @property
    def is_covered(self) -> bool:
        half = self.high - self.printed if self.judged > self.printed else self.printed - self.low
        return abs(self.judged - self.printed) <= math.hypot(half, self.half)


Figures = dict[tuple[str, str], list[Figure | None]]  # by row and column of the table; None: too few groups


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("real", type=Path, metavar="FOLDER", help="the folder of real_sets.py")
    parser.add_output("FOLDER", "folder for features, links and runs")
    parser.add_argument("-draws", type=at_least(0), default=60, metavar="N", help="draws with a linear head [60]")
    parser.add_argument("-runs", type=at_least(0), default=10, metavar="N", help="runs with a tenth held out [10]")
    parser.add_argument("-fold_runs", type=at_least(0), default=10, metavar="N", help="runs with -folds [10]")
    parser.add_argument(
        "-largest", type=at_least(SMALLEST), default=500, metavar="N", help="largest number of images in a draw [500]"
    )
    arguments = parser.parse_args(argv)
    pools = {name: pool_of(name, arguments.real, arguments.output) for name in (*SETS, FONTS)}
    figures: Figures = defaultdict(list)
    if arguments.draws:
        features = {name: features_of(pool, arguments.real) for name, pool in pools.items()}
        for number in range(arguments.draws):
            name = SETS[number % len(SETS)]
            measure(draw(pools[name], number, arguments.largest), features[name], figures)
            measure(draw_families(pools[FONTS], number), features[FONTS], figures)
            print(f"draw {number + 1} of {arguments.draws}", file=sys.stderr, flush=True)
    for column, count in (("held out", arguments.runs), ("folds", arguments.fold_runs)):
        for number in range(count):
            drawn = draw(pools[SETS[number % len(SETS)]], number, arguments.largest)
            figure = run(drawn, column, arguments)
            figures["whole runs", column].append(figure)
            print(f"{column}, run {number + 1}: {figure}, covered: {figure.is_covered}", file=sys.stderr, flush=True)
    print(table(figures))
    return 0


# --- the images ---


def pool_of(name: str, real: Path, output: Path) -> Pool:
    """Return the images of a set. Make a folder with links to them, and with copies of stamps and emoji."""
    folder, families = output / "pools" / name, None
    if name == FONTS:
        rows = [row for file in ("known.csv", "new.csv") for row in rows_of(real / FONTS / file)]
        rows = rows[::2]  # three of six words in each font
        files = {f"{class_of(int(row['weight']))}/{Path(row['path']).name}": real / FONTS / row["path"] for row in rows}
        families = np.array([row["family"] for row in rows])
    else:
        paths = (path for part in FOLDERS[name] for path in sorted((real / name / part).glob("*/*")))
        files = {f"{path.parent.name}/{path.name}": path for path in paths}
    for path, file in files.items():
        link, copy = folder / "images" / path, folder / "copies" / again(path)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file.resolve())
        if name != FONTS and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            Image.open(file, formats=("PNG", "JPEG", "GIF", "WEBP")).convert("RGB").save(copy, quality=50)
    labels = [path.split("/")[0] for path in files]
    classes, targets = np.unique(labels, return_inverse=True)
    return Pool(folder, [*files], targets, classes.tolist(), families)


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def class_of(weight: int) -> str:
    return next(name for largest, name in WEIGHT_NAMES.items() if weight <= largest)


def again(path: str) -> str:
    """Return the path of the copy of an image."""
    return f"{path.rsplit('.', 1)[0]} (again).jpg"


def renamed(path: str, number: int) -> str:
    """Return the name of an image in a draw. Names decide the split, so equal names would hold out the same images."""
    label, file = path.split("/")
    return f"{label}/{number}-{file}"


def features_of(pool: Pool, real: Path) -> Features:
    file = pool.folder.with_suffix(".npz")
    if not file.exists():
        options = ["-opts", f"MODEL.NAME={MODEL}", f"DATA.IMAGE_SIZE={SIDE}"]
        words = [real / WEIGHTS, pool.folder, "-output", file, *options]
        start([sys.executable, ROOT / "scripts/embed.py", *words])
    with np.load(file, allow_pickle=False) as saved:
        features = dict(zip(saved["paths"].tolist(), saved["features"][:, ::EACH_FEATURE], strict=True))
    of_images = np.stack([features[f"images/{path}"] for path in pool.paths])
    of_copies = [features[f"copies/{again(path)}"] for path in pool.paths if pool.families is None]
    return Features(of_images, np.array(of_copies, np.float32).reshape(len(of_copies), of_images.shape[1]))


def draw(pool: Pool, number: int, largest: int) -> Draw:
    """Return a draw of at most `largest` stamps or emoji. In every second draw of each set, some have copies."""
    random = np.random.default_rng(number)
    count = int(random.integers(SMALLEST, largest + 1))
    order = random.permutation(len(pool.paths))
    num_copied = count // 10 if number // len(SETS) % 2 else 0
    return Draw(pool, number, order[:count], order[:num_copied], order[count:])


def draw_families(pool: Pool, number: int) -> Draw:
    random = np.random.default_rng(number)
    count = int(random.integers(FEWEST_FAMILIES, MOST_FAMILIES + 1))
    is_learned = np.isin(pool.families, random.permutation(np.unique(pool.families))[:count])
    return Draw(pool, number, np.flatnonzero(is_learned), np.zeros(0, np.int64), np.flatnonzero(~is_learned))


def images_of(drawn: Draw, is_grouped: bool) -> Table:
    """Return the learned images of a draw, then their copies, for the program's split, which needs names and groups.

    `is_grouped`: whether the images know their copies, and their families.
    """
    pool, rows = drawn.pool, np.concatenate([drawn.learned, drawn.copied])
    paths = [pool.paths[row] for row in drawn.learned] + [again(pool.paths[row]) for row in drawn.copied]
    names = [renamed(path, drawn.number) for path in paths]
    groups = None
    if is_grouped and pool.families is not None:
        groups = Texts.of([family.encode() for family in pool.families[rows].tolist()])
    return Table(
        FileStorage(Path(), names),
        pool.targets[rows],
        pool.classes,
        split={"training": pool.folder.name},
        groups=groups,
        copies=rows if is_grouped and len(drawn.copied) else None,
    )


# --- linear classifiers of stored features ---


def measure(drawn: Draw, features: Features, figures: Figures) -> None:
    """Add the figures of linear classifiers of a draw: with groups and copies, and if there are some, without them."""
    has_groups = drawn.pool.families is not None
    name = drawn.pool.folder.name
    if len(drawn.copied):
        name += ", copies"
    if has_groups:
        name += ", by family"
    for is_grouped in (True, False) if has_groups or len(drawn.copied) else (True,):
        row = name if is_grouped else f"{name}: not looked for"
        heads = Heads(drawn, features, images_of(drawn, is_grouped))
        for column, figure in (("held out", heads.held_out), ("folds", heads.folds)):
            figures[row, column].append(figure)
            if is_grouped and not has_groups:
                figures["stamps and emoji, all", column].append(figure)


class Heads:
    """The linear classifiers of a draw."""

    def __init__(self, drawn: Draw, features: Features, images: Table):
        self._drawn, self._images = drawn, images
        self._of_judge = features.of_images[drawn.judging]
        self._features = np.concatenate([features.of_images[drawn.learned], features.of_copies[drawn.copied]])
        has_families = drawn.pool.families is not None
        fraction = FRACTION_OF_FONTS if has_families else FRACTION
        group_by = "family" if images.groups is not None else Config().DATA.GROUP_BY
        self._config = Config().changed("DATA", VAL_FRACTION=fraction, GROUP_BY=group_by)

    @cached_property
    def held_out(self) -> Figure | None:
        train, val = split(self._config, self._images, None).tables(self._images)
        are_right, by_judge = self._predict(train.rows, val.rows)
        return figure_of(interval_of(are_right, val), by_judge, self._drawn)

    @cached_property
    def folds(self) -> Figure | None:
        whole, _ = split(self._config.changed("DATA", FOLDS=NUM_FOLDS), self._images, None).tables(self._images)
        are_right, rows = np.zeros(len(whole), bool), np.arange(len(whole))
        for fold in range(NUM_FOLDS):
            is_asked = whole.folds == fold
            are_right[is_asked] = self._predict(rows[~is_asked], rows[is_asked])[0]
        _, by_judge = self._predict(rows, rows[:0])
        return figure_of(interval_of(are_right, whole), by_judge, self._drawn)

    def _predict(self, learned: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether a classifier of the learned images is right about the asked ones, and about the judge's."""
        targets = self._images.targets
        features, classes = torch.from_numpy(self._features[learned]), torch.from_numpy(targets[learned])
        head = fit_linear(features, classes, len(self._images.classes), functional.cross_entropy)
        weight, bias = head.weight.numpy(), head.bias.numpy()
        own, other = ((rows @ weight.T + bias).argmax(1) for rows in (self._features[asked], self._of_judge))
        return own == targets[asked], other == self._drawn.pool.targets[self._drawn.judging]


def interval_of(are_right: np.ndarray, images: Table) -> tuple[float, float, float] | None:
    """Return an accuracy with its interval, as a run prints them, or None if there are too few groups."""
    percent, groups = 100 * float(are_right.mean()), groups_of(images)
    if groups is None:
        return percent, *wilson_interval(percent, len(are_right))
    by_groups = accuracy_interval(are_right, groups)
    return None if by_groups.low is None else (percent, by_groups.low, by_groups.high)


def figure_of(printed: tuple[float, float, float] | None, by_judge: np.ndarray, drawn: Draw) -> Figure | None:
    """Return a figure. `by_judge`: whether the model is right about each image of the judge."""
    if printed is None:
        return None
    deviations, groups = 1.96, None
    if drawn.pool.families is not None:
        groups = np.unique(drawn.pool.families[drawn.judging], return_inverse=True)[1]
        deviations = student(degrees_of(groups))
    error = standard_error(by_judge.astype(np.float64), groups)
    return Figure(*printed, 100 * float(by_judge.mean()), 100 * deviations * error)


# --- whole runs ---


def run(drawn: Draw, column: str, arguments) -> Figure:
    """Train on a draw, unless it was done before. Return the figures of the run and of the judge."""
    name = f"{drawn.number}-{arguments.largest}"
    folder = arguments.output / "runs" / f"{name}-{column.replace(' ', '-')}"
    drawn = drawn._replace(judging=drawn.judging[:MOST_JUDGING])
    images, judge = arguments.output / "images" / name, arguments.output / "judges" / name
    link_all(drawn, drawn.learned, images)
    link_all(drawn, drawn.copied, images, is_again=True)
    link_all(drawn, drawn.judging, judge)
    if not (folder / "run/results.json").exists():
        words = ["-pretrained", arguments.real / WEIGHTS, "-data_path", images, "-epochs", 5]
        words += ["-folds", NUM_FOLDS] if column == "folds" else []
        words += ["-output", folder, "-name", "run", "-resume", "auto"]
        options = [
            "-opts",
            f"MODEL.NAME={MODEL}",
            "DATA.IMAGE_SIZE=64",
            f"SEED={drawn.number}",
            "REPORT=false",
            "TRACK=[]",
        ]
        start([sys.executable, ROOT / "main_single_gpu.py", *words, *options])
    if not list(folder.glob(f"eval-*/{PREDICTIONS}")):
        words = ["-eval", "-pretrained", folder / "run/best.pth", "-data_path", judge, "-output", folder]
        start([sys.executable, ROOT / "main_single_gpu.py", *words, "-opts", "REPORT=false"])
    record = json.loads((folder / "run/results.json").read_text())
    interval = record.get("interval") or wilson_interval(record["value"], record["num_images"])
    (table_of_judge,) = folder.glob(f"eval-*/{PREDICTIONS}")
    return figure_of((record["value"], *interval), right_in(table_of_judge), drawn)


def link_all(drawn: Draw, rows: np.ndarray, folder: Path, is_again: bool = False) -> None:
    """Make links to images of a draw, or to their copies."""
    for row in rows:
        path, source = drawn.pool.paths[row], drawn.pool.folder / "images"
        if is_again:
            path, source = again(path), drawn.pool.folder / "copies"
        link = folder / renamed(path, drawn.number)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to((source / path).resolve())


# --- the table ---


def table(figures: Figures) -> str:
    columns = ["held out", "folds"]
    titles = (f"{column}: {title}" for column in columns for title in ("covered", "half width", "printed - judge"))
    names = dict.fromkeys(row for row, _ in figures)
    rows = [[name, *(cell for column in columns for cell in cells(figures.get((name, column), [])))] for name in names]
    return markdown_table(["draws", *titles], rows)


def cells(figures: list[Figure | None]) -> list[str]:
    """Return the coverage, the mean half width of the intervals, and the mean difference from the judge."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return ["-", "-", "-"]
    num_covered = sum(figure.is_covered for figure in known)
    low, high = binomtest(num_covered, len(known)).proportion_ci(method="exact")
    share = f"{num_covered} of {len(known)} ({100 * low:.0f} to {100 * high:.0f}%)"
    half = np.mean([(figure.high - figure.low) / 2 for figure in known])
    difference = np.mean([figure.printed - figure.judged for figure in known])
    return [share, f"{half:.1f}", f"{difference:+.1f}"]


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
