"""A small student of a larger teacher: digits that a ViT of 0.01 M parameters learns with and without one of 0.2 M.

python scripts/benchmarks/studies/distillation.py

Trains the teacher once, as configs/vit_digits.yaml says, and for each seed a student of a few epochs alone, with the
teacher's class (hard) and with its probabilities (soft). Exit code 1 if hard distillation does not raise the mean accuracy
on the 359 validation images by more than two standard errors of its differences to the student alone; of the soft ways the
table only tells what they do.
"""

import csv
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that the script runs from any folder

from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.command_line import Parser, at_least
from utils.program import exit_code

RECIPE = ROOT / "configs/vit_digits.yaml"
STUDENT = ("MODEL.EMBED_DIM=24", "MODEL.DEPTH=2", "MODEL.NUM_HEADS=2")
WAYS = {
    "alone": ("TRAIN.DISTILLATION_TYPE=none",),
    "hard": ("TRAIN.DISTILLATION_TYPE=hard",),
    "soft": ("TRAIN.DISTILLATION_TYPE=soft",),
    "soft, alpha 0.9, tau 2": (
        "TRAIN.DISTILLATION_TYPE=soft",
        "TRAIN.DISTILLATION_ALPHA=0.9",
        "TRAIN.DISTILLATION_TAU=2",
    ),
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-seeds", type=at_least(2), default=5, metavar="N", help="how many, from 0 [5]")
    parser.add_argument("-epochs", type=at_least(1), default=15, metavar="N", help="of each student [15]")
    arguments = parser.parse_args(argv)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        of_teacher, teacher = train(Path(folder) / "teacher", ["-seed", 1000], [])
        for seed in range(arguments.seeds):
            for name, options in WAYS.items():
                words = ["-seed", seed, "-epochs", arguments.epochs]
                named = [] if name == "alone" else [f"TRAIN.TEACHER_MODEL={teacher}"]
                found[name].append(train(Path(folder) / f"{seed} {name}", words, [*STUDENT, *options, *named])[0])
                print(f"seed {seed}, {name}: {found[name][-1]:.2f}", file=sys.stderr, flush=True)
    title = f"Teacher {of_teacher:.1f}%. {arguments.seeds} seeds, {arguments.epochs} epochs. {machine('cpu')}"
    print(tabulate(found, title).markdown())
    mean, error = gain(found, "hard")
    return int(mean <= 2 * error)


def train(output: Path, words: Sequence[object], options: Sequence[str]) -> tuple[float, Path]:
    """One run by the entry script: accuracy of the last epoch in percent, and its checkpoint."""
    always = ["TENSORBOARD=false", "DEVICE=cpu", "VALIDATE_FREQ=1000", "SAVE_FREQ=1000"]
    command = ["main_single_gpu.py", "-cfg", RECIPE, "-output", output, "-num_workers", 0, *words, "-opts", *always]
    subprocess.run([sys.executable, *map(str, command), *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder,) = output.iterdir()
    with open(folder / "metrics.csv", newline="") as rows:
        last = list(csv.DictReader(rows))[-1]
    return float(last["eval_top1"]), folder / "last.pth"


def gain(found: dict[str, list[float]], name: str) -> tuple[float, float]:
    """What a way gains on the student alone, seed against seed: mean and standard error."""
    differences = [own - alone for own, alone in zip(found[name], found["alone"], strict=True)]
    return statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def tabulate(found: dict[str, list[float]], title: str) -> Table:
    rows = []
    for name, values in found.items():
        mean, error = gain(found, name)
        figures = f"{statistics.mean(values):.1f} +- {statistics.stdev(values):.1f}"
        rows.append([name, figures, "-" if name == "alone" else f"{mean:+.1f} +- {error:.1f}"])
    return Table(title, ["student", "top-1, %", "gain, +- standard error"], rows)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
