"""Fine-tunes on the solar cells of elpv-dataset as in the paper that published them (arXiv:1807.02894), and scores as it does.

    python tests/support/real_sets.py -output real
    python scripts/benchmarks/solar.py real -output solar-runs
    python scripts/benchmarks/solar.py real -output solar-runs -image_size 300 -epochs 30 -splits 5

A cell is functional or defective, and its experts were sure or not. A quarter of the 2,624 cells is held out, in five splits
that are stratified by label, certainty and type of cell. The accuracy is weighted: a sure label counts 1, an unsure functional one
1/3, an unsure defective one 2/3. The training does not weigh. Runs that exist are not repeated.
"""

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np

from scripts.benchmarks.common import ROOT
from scripts.benchmarks.real import MODEL, WEIGHTS, evaluated, start
from scripts.command_line import Parser, at_least

HELD_OUT = 0.25
WEIGHTS_OF_LABELS = {0: 1.0, 1: 1 / 3, 2: 2 / 3, 3: 1.0}  # by three times the probability of a defect
FIGURES = ("weighted accuracy", "plain accuracy", "plain accuracy of the linear classifier")
PAPER = "the paper: 88.42% with a CNN, 82.44% with a support vector machine"


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("real", type=Path, metavar="FOLDER", help="the folder of real_sets.py")
    parser.add_output("FOLDER", "folder for the links and the runs")
    parser.add_argument("-image_size", type=at_least(32), default=224, metavar="N", help="pixels [224]")
    parser.add_argument("-epochs", type=at_least(1), default=30, metavar="N", help="epochs [30]")
    parser.add_argument("-splits", type=at_least(1), default=5, metavar="N", help="splits [5]")
    parser.add_argument("-opts", nargs="+", default=[], metavar="KEY=VALUE", help="other settings of the fine-tuning")
    given = parser.parse_args(argv)
    cells, scores = read_cells(given.real / "solar"), []
    for split in range(given.splits):
        folder = run(given, cells, split)
        scores.append((*score(evaluated(folder, ["-data_path", folder]), cells), start_of(folder)))
        figures = [f"{name} {value:.2f}%" for name, value in zip(FIGURES, scores[-1], strict=True)]
        print(f"split {split}: {', '.join(figures)}", flush=True)
    for name, values in zip(FIGURES, zip(*scores, strict=True), strict=True):
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: {statistics.mean(values):.2f}% +- {deviation:.2f} (standard deviation of the splits)")
    print(PAPER)
    return 0


def read_cells(folder: Path) -> dict[str, tuple[int, str]]:
    """Return {path: (three times the probability of a defect, type)} of all cells."""
    cells = {}
    for part in ("train.csv", "val.csv"):
        with open(folder / part, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                cells[str((folder / row["path"]).resolve())] = (round(3 * float(row["defect"])), row["type"])
    return cells


def run(given, cells: dict[str, tuple[int, str]], split: int) -> Path:
    """Write the images of a split as links, fine-tune on them, and return the folder."""
    folder = given.output / "-".join(map(str, (given.image_size, given.epochs, split, *given.opts)))
    draw, strata = np.random.default_rng(split), defaultdict(list)
    for path, stratum in sorted(cells.items()):
        strata[stratum].append(path)
    parts = {"train": [], "val": []}
    for paths in strata.values():
        order, held_out = draw.permutation(len(paths)), round(HELD_OUT * len(paths))
        parts["val"] += [paths[number] for number in order[:held_out]]
        parts["train"] += [paths[number] for number in order[held_out:]]
    for part, paths in parts.items():
        for path in map(Path, paths):
            label = "functional" if cells[str(path)][0] < 2 else "defective"
            (folder / part / label).mkdir(parents=True, exist_ok=True)
            if not (link := folder / part / label / path.name).exists():
                link.symlink_to(path)
    if not list(folder.glob("*/results.json")):
        words = ["-pretrained", given.real / WEIGHTS, "-data_path", folder, "-epochs", given.epochs]
        options = [MODEL[0], f"DATA.IMAGE_SIZE={given.image_size}", f"SEED={split}", f"VALIDATE_FREQ={given.epochs}"]
        words += ["-output", folder, "-name", "run", "-resume", "auto", "-opts", *options, "REPORT=false", *given.opts]
        start([sys.executable, ROOT / "main_single_gpu.py", *words])
    return folder


def start_of(folder: Path) -> float:
    """Return the plain accuracy of the linear classifier that the run of a folder measured before training, in percent."""
    first, *_ = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(first)["eval_top1"]


def score(table: Path, cells: dict[str, tuple[int, str]]) -> tuple[float, float]:
    """Return the weighted and the plain accuracy of a table of predictions, in percent."""
    with open(table, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    right = np.array([row["label"] == row["prediction"] for row in rows], float)
    by_name = {Path(path).name: values for path, values in cells.items()}
    weights = np.array([WEIGHTS_OF_LABELS[by_name[Path(row["image"]).name][0]] for row in rows])
    return 100 * float(weights @ right / weights.sum()), 100 * float(right.mean())


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
