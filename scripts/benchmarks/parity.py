"""Trains one recipe in several precisions over several seeds and judges: none may be less accurate than float32.

python scripts/benchmarks/parity.py                                    the digits, in what this device computes fast
python scripts/benchmarks/parity.py -cfg configs/vit_cifar10.yaml -modes fp32 bf16 naive-bf16 fp16 -seeds 3

A mode is worse when its mean accuracy lies below fp32's by more than two standard errors of the difference, where each
seed is taken to vary as fp32's seeds do: 2 x s x sqrt(1/n + 1/n), s the standard deviation of fp32's n accuracies. The
mode's own deviation does not count: one collapsed seed would excuse itself. A run that stops without an accuracy is
worse in any case. Exit code 1 if a mode is worse; a mode that the settings refuse here is listed, not judged. Training
loss and gradient norm of the last epoch are told beside, each seed's against fp32's: they show more than a few images can.
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

from scripts.benchmarks.parts.common import MODES, ROOT, SLOW_ON_CPUS, Panel, Table, machine
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError, did_you_mean
from utils.program import exit_code

USER_ERROR = 2  # what the entry script ends with for a setting that it refuses


@dataclass(frozen=True)
class Run:
    """The last epoch of one run, NaN if it stopped (exit code 3)."""

    top1: float = math.nan  # of the validation images, per cent
    train_loss: float = math.nan
    grad_norm: float = math.nan


@dataclass(frozen=True)
class Verdict:
    """What is said of one mode."""

    worse: bool
    text: str


def judge(values: list[float], fp32: list[float]) -> Verdict:
    """Accuracies in percent of one mode and of fp32, a value for each seed; NaN for a run that stopped."""
    if any(math.isnan(value) for value in values):
        return Verdict(True, "WORSE: a run stopped")
    allowed = 2 * statistics.stdev(fp32) * math.sqrt(1 / len(values) + 1 / len(fp32))
    difference = statistics.mean(values) - statistics.mean(fp32)
    worse = difference < -allowed - 1e-9  # equal up to rounding is equal
    return Verdict(worse, f"{'WORSE' if worse else 'no worse'}: {difference:+.2f}, {-allowed:+.2f} allowed")


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    refused: dict[str, str] = {}
    found: dict[str, list[Run]] = {name: [] for name in arguments.modes}
    for seed in range(arguments.seeds):
        for name in arguments.modes:
            if name in refused:
                continue
            try:
                found[name].append(train(arguments, name, seed))
            except ConfigError as error:
                refused[name] = str(error)
                del found[name]
                continue
            print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    if "fp32" not in found:
        raise ConfigError(f"-cfg: {arguments.cfg} does not train in fp32: {refused['fp32']}")
    accuracies = {name: [run.top1 for run in runs] for name, runs in found.items()}
    if any(math.isnan(value) for value in accuracies["fp32"]):
        raise ConfigError(
            f"-cfg: {arguments.cfg} stops in fp32, so there is nothing to compare with; lower TRAIN.BASE_LR"
        )
    verdicts = {name: judge(values, accuracies["fp32"]) for name, values in accuracies.items()}
    title = ", ".join([Path(arguments.cfg).stem, *arguments.opts, f"{arguments.seeds} seeds. {machine()}"])
    table = tabulate(title, found, verdicts, refused)
    print(table.markdown())
    if arguments.png:
        table.draw(arguments.png)
    return int(any(verdict.worse for verdict in verdicts.values()))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("-cfg", default=str(ROOT / "configs/vit_digits.yaml"), metavar="FILE", help="[vit_digits]")
    parser.add_argument("-modes", nargs="+", metavar="MODE", help=f"of {' '.join(MODES)}; fp32 is always there")
    parser.add_argument("-seeds", type=at_least(2), default=5, metavar="N", help="how many, from 0; at least 2 [5]")
    parser.add_argument("-png", type=Path, metavar="FILE", help="also draw the means as a chart")
    parser.add_argument("-opts", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    arguments = parser.parse_args(argv)
    for name in arguments.modes or ():
        if name not in MODES:
            raise ConfigError(
                f"-modes: there is no mode {name!r} (there are {', '.join(MODES)}){did_you_mean(name, MODES)}"
            )
    arguments.modes = list(dict.fromkeys(["fp32", *(arguments.modes or fast_modes())]))
    return arguments


def fast_modes() -> list[str]:
    from utils.distributed import find_devices

    kind, _ = find_devices("auto")
    return [name for name, mode in MODES.items() if kind in mode.kinds and (kind != "cpu" or name not in SLOW_ON_CPUS)]


def train(arguments: argparse.Namespace, name: str, seed: int) -> Run:
    """One run by the entry script."""
    mode = MODES[name]
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", arguments.cfg, "-seed", seed, "-output", output]
        command += ["-opts", "TENSORBOARD=false", *arguments.opts, *mode.options]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if result.returncode == USER_ERROR:
            raise ConfigError(result.stderr.strip().splitlines()[-1].removeprefix("error: "))
        if result.returncode:
            print(result.stderr, file=sys.stderr)
            return Run()
        (metrics,) = Path(output).glob("*/metrics.jsonl")
        last = json.loads(metrics.read_text().splitlines()[-1])
        return Run(last["eval_top1"], last["train_loss"], last["grad_norm"])


def tabulate(title: str, found: dict[str, list[Run]], verdicts: dict[str, Verdict], refused: dict[str, str]) -> Table:
    rows, means = [], {}
    for name, runs in found.items():
        values = [run.top1 for run in runs]
        each = " ".join(f"{value:.2f}" for value in values)
        means[name] = statistics.mean(values)
        verdict = "-" if name == "fp32" else verdicts[name].text
        row = [name, each, f"{means[name]:.2f}", f"{statistics.stdev(values):.2f}", verdict]
        for field in ("train_loss", "grad_norm"):
            own, fp32 = ([getattr(run, field) for run in side] for side in (runs, found["fp32"]))
            row.append(f"{statistics.mean(own):.4g}" + f" ({deviations(own, fp32)})" * (name != "fp32"))
        rows.append(row)
    columns = ["mode", "validation top-1 of each seed, %", "mean", "standard deviation", "against fp32"]
    columns += ["training loss (against fp32, %)", "gradient norm (against fp32, %)"]
    rows += [[name, reason, "-", "-", "not judged", "-", "-"] for name, reason in refused.items()]
    return Table(title, columns, rows, panels=[Panel("mean top-1, %", means)])


def deviations(own: list[float], fp32: list[float]) -> str:
    """Mean, minimum and maximum over the seeds, per cent."""
    each = [100 * (mine / its - 1) for mine, its in zip(own, fp32, strict=True)]
    return f"{statistics.mean(each):+.1f}, {min(each):+.1f} to {max(each):+.1f}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
