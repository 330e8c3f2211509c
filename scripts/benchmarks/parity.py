"""Trains one recipe in several precisions with several seeds, and checks that no precision is worse than float32.

python scripts/benchmarks/parity.py                                    the digits, in the fast precisions of this device
python scripts/benchmarks/parity.py -cfg configs/vit_cifar10.yaml -modes fp32 bf16 naive-bf16 fp16 -seeds 3

A mode is worse if its mean accuracy is below fp32's by more than two standard errors of the difference. This margin is
2 x s x sqrt(1/n + 1/n), where s is the standard deviation of fp32's n accuracies. The mode's own deviation does not
count, since one collapsed seed would widen the margin. A mode with a run that stops early is always worse. The exit
code is 1 if a mode is worse. A mode that the program refuses on this machine is listed but not judged. The table also
has the training loss and the gradient norm of the last epoch, compared with fp32's for each seed. Loss and norm reveal
smaller differences than the accuracy on a few images.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.benchmarks.common import MODES, ROOT, fast_modes, machine, table
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError
from utils.host import find_devices

USER_ERROR = 2  # the exit code of the entry script for a setting that it refuses
Verdict = tuple[bool, str]  # whether a mode is worse than fp32, and the text for the table


@dataclass(frozen=True)
class Run:
    """The figures of the last epoch of one run. All are NaN if the run failed, for example with exit code 3."""

    top1: float = math.nan  # validation accuracy in percent
    train_loss: float = math.nan
    grad_norm: float = math.nan


def judge(values: list[float], fp32: list[float]) -> Verdict:
    """Compare a mode's accuracies (one per seed, in percent) with fp32's. NaN means that the run stopped."""
    if any(math.isnan(value) for value in values):
        return True, "WORSE: a run stopped"
    allowed = 2 * statistics.stdev(fp32) * math.sqrt(1 / len(values) + 1 / len(fp32))
    difference = statistics.mean(values) - statistics.mean(fp32)
    worse = difference < -allowed - 1e-9  # a difference from rounding does not count
    return worse, f"{'WORSE' if worse else 'no worse'}: {difference:+.2f}, {-allowed:+.2f} allowed"


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    settings = ROOT / "configs/vit_digits.yaml"
    parser.add_argument("-cfg", default=str(settings), metavar="FILE", help="settings file [vit_digits]")
    modes_help = f"choose from {' '.join(MODES)}; fp32 is always measured"
    parser.add_argument("-modes", nargs="+", choices=MODES, metavar="MODE", help=modes_help)
    parser.add_argument(
        "-seeds", type=at_least(2), default=5, metavar="N", help="number of seeds, counted from 0; at least 2 [5]"
    )
    parser.add_argument("-opts", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    arguments = parser.parse_args(argv)
    modes = dict.fromkeys(["fp32", *(arguments.modes or fast_modes(find_devices("auto")[0]))])
    refused: dict[str, str] = {}
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    for seed in range(arguments.seeds):
        for name in [name for name in modes if name not in refused]:
            try:
                runs[name].append(train(arguments, name, seed))
                print(f"seed {seed}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
            except ConfigError as error:
                refused[name] = str(error)
                del runs[name]
    if "fp32" not in runs:
        raise ConfigError(f"-cfg: {arguments.cfg} does not train in fp32: {refused['fp32']}")
    fp32 = [run.top1 for run in runs["fp32"]]
    if any(math.isnan(value) for value in fp32):
        raise ConfigError(f"-cfg: {arguments.cfg} stops in fp32, so there is no baseline; lower TRAIN.BASE_LR")
    verdicts = {name: judge([run.top1 for run in each], fp32) for name, each in runs.items()}
    title = ", ".join([Path(arguments.cfg).stem, *arguments.opts, f"{arguments.seeds} seeds. {machine()}"])
    print(tabulate(title, runs, verdicts, refused))
    return int(any(worse for worse, _ in verdicts.values()))


def train(arguments: argparse.Namespace, name: str, seed: int) -> Run:
    """Train one mode with one seed. Raise ConfigError if main_single_gpu.py refuses the settings."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", arguments.cfg, "-seed", seed, "-output", output]
        command += ["-opts", "TRACK=none", *arguments.opts, *MODES[name].options]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if result.returncode == USER_ERROR:
            raise ConfigError(result.stderr.strip().splitlines()[-1].removeprefix("error: "))
        if result.returncode:
            print(result.stderr, file=sys.stderr)
            return Run()
        (metrics,) = Path(output).glob("*/metrics.jsonl")
        last = json.loads(metrics.read_text().splitlines()[-1])
        return Run(last["eval_top1"], last["train_loss"], last["grad_norm"])


def tabulate(title: str, runs: dict[str, list[Run]], verdicts: dict[str, Verdict], refused: dict[str, str]) -> str:
    rows = []
    for name, own in runs.items():
        values = [run.top1 for run in own]
        row = [name, " ".join(f"{value:.2f}" for value in values), f"{statistics.mean(values):.2f}"]
        deviation = math.nan if any(map(math.isnan, values)) else statistics.stdev(values)
        row += [f"{deviation:.2f}", "-" if name == "fp32" else verdicts[name][1]]
        for field in ("train_loss", "grad_norm"):
            figures, fp32 = ([getattr(run, field) for run in side] for side in (own, runs["fp32"]))
            ratios = [100 * (figure / its - 1) for figure, its in zip(figures, fp32, strict=True)]
            against = f" ({statistics.mean(ratios):+.1f}, {min(ratios):+.1f} to {max(ratios):+.1f})"
            row.append(f"{statistics.mean(figures):.4g}" + ("" if name == "fp32" else against))
        rows.append(row)
    columns = ["mode", "validation top-1 of each seed, %", "mean", "standard deviation", "against fp32"]
    columns += ["training loss (against fp32, %)", "gradient norm (against fp32, %)"]
    rows += [[name, reason, "-", "-", "not judged", "-", "-"] for name, reason in refused.items()]
    return table(title, columns, rows)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
