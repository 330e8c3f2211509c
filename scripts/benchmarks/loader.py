"""Measures how fast images are read, and finds the bottleneck of a run. Prints the Markdown tables of BENCHMARKS.md.

python scripts/benchmarks/loader.py limits -cfg FILE [...]
python scripts/benchmarks/loader.py run -timm FOLDER

`limits` measures the loader alone, the step alone, both together, and the limit; `run` a whole run, compared with
timm's train.py in FOLDER.

Without -photos, `run` makes JPEGs of 500 x 375 pixels and about 100 kB (photos.py). The compared programs take turns.
"""

import argparse
import contextlib
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.benchmarks.common import ROOT, Refused, StepWorker, Turns, compare, machine, spread, table
from scripts.benchmarks.photos import make_photos
from scripts.command_line import Parser, at_least
from utils.host import available_cores, find_devices
from utils.text import counted

BATCH_SIZE = 32  # default on a CPU


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    # All other flags are flags of main_single_gpu.py, such as -cfg and -dataset.
    command = commands.add_parser("limits", add_help=False)
    command.set_defaults(measure=compare_limits)
    command.add_argument("-seconds", type=float, default=3.0)
    command = commands.add_parser("run")
    command.set_defaults(measure=compare_runs)
    folder_help = "a folder with train/ and val/ as written by photos.py [a new folder]"
    command.add_argument("-photos", type=Path, metavar="FOLDER", help=folder_help)
    command.add_argument(
        "-rounds", type=at_least(1), default=5, metavar="N", help="number of rounds with one run of each program [5]"
    )
    command.add_argument("-timm", type=Path, required=True, help="a copy of timm's repository, with train.py")
    command.add_argument("-model", default="vit_tiny_patch16_224", help="name of a timm model [vit_tiny_patch16_224]")
    command.add_argument("-batch_size", type=at_least(1), help=f"batch size [{BATCH_SIZE} on a CPU, else 256]")
    command.add_argument("-num_workers", type=at_least(1), help="loader threads (timm: processes) [one per core]")
    command.add_argument("-compile", action="store_true", help="compile both models")
    arguments, arguments.flags = parser.parse_known_args(argv)
    if arguments.flags and arguments.command != "limits":
        parser.error(f"unrecognized arguments: {' '.join(arguments.flags)}")
    print(machine() + "\n", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        arguments.measure(arguments, Path(scratch))
    return 0


# --- the loader and the model ---


def compare_limits(arguments: argparse.Namespace, scratch: Path) -> None:
    """Measure the loader, the step and both together in turn, with a run's device and settings; print the rates."""
    from configs.auto import without_auto
    from engine.settings import load_settings

    flags = arguments.flags
    where = flags.index("-opts") if "-opts" in flags else len(flags)
    # Use a separate cache folder, because a folder keeps only the newest cache of a data set.
    flags, options = flags[:where], [*flags[where + 1 :], f"DATA.CACHE_PATH={scratch / 'cache'}", "DATA.DROP_LAST=true"]
    config = without_auto(load_settings([*flags, "-opts", *options])).config
    classes, size = config.MODEL.NUM_CLASSES or 1000, 20 * config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER
    synthetic = [*options, f"MODEL.NUM_CLASSES={classes}", f"DATA.SYNTHETIC_SIZE={size}"]
    no_path = [each for before, each in zip(["", *flags], flags, strict=False) if "-data_path" not in (before, each)]
    sides = {
        "loader alone": StepWorker([*flags, "-opts", *options], role="loader"),
        "step alone, synthetic data": StepWorker([*no_path, "-dataset", "synthetic", "-opts", *synthetic]),
        "both": StepWorker([*flags, "-opts", *options]),
    }
    with contextlib.suppress(Refused):  # compare() reports the reason
        sides["loader alone"].start()
        sides["loader alone"].ask("images_per_update")  # only this worker builds the cache, before the others start
    turns = Turns(rounds=3, steps=3, min_seconds=arguments.seconds)
    measured = compare(sides, turns)
    rows = [[name, spread(each.images_per_second)] for name, each in measured.items()]
    print(table(f"batch {config.DATA.BATCH_SIZE}, {turns}", ["", "images/s, median (spread)"], rows))
    print(name_limit(*(statistics.median(each.images_per_second) for each in measured.values())))


def name_limit(loader: float, step: float, both: float) -> str:
    """Return a sentence that names the bottleneck of a run, given the images/s of the loader, the step, and both."""
    if both < 0.9 * min(loader, step):
        share = both / min(loader, step)
        return (
            f"the loader and the step share the cores: together they reach {share:.2f} of the slower of their rates; "
            "set DATA.CACHE, so that loading needs fewer cores"
        )
    if loader < 1.1 * step:
        return (
            f"the loader is the bottleneck: alone, it reaches {loader / step:.2f} of the step's rate; raise "
            "-num_workers, or set DATA.CACHE"
        )
    return f"the step is the bottleneck: the loader alone reaches {loader / step:.1f} times the step's rate"


# --- a whole run ---

# The same recipe for both programs: one epoch, bfloat16, AdamW, crops and flips.
TIMM = """--num-classes 10 --epochs 1 --warmup-epochs 0 --sched step --decay-epochs 9 --opt adamw --lr 1e-3
--weight-decay 0.05 --amp --amp-dtype bfloat16 --color-jitter 0"""
OURS = """TRAIN.WARMUP_EPOCHS=0 TRAIN.LR_SCHEDULER.NAME=constant TRAIN.BASE_LR=1e-3 TRAIN.LINEAR_SCALED_LR=null
TRAIN.WEIGHT_DECAY=0.05 TRAIN.SMOOTHING=0.1 TRAIN.GRAD_CLIP=null TRAIN.MODEL_EMA=false MODEL.DROPOUT=0
MODEL.ATTENTION_DROPOUT=0 DATA.CROP_PCT=0.9"""


def timm_command(arguments: argparse.Namespace, photos: Path, output: Path) -> list[str]:
    """Return the command that runs timm's train.py with the flags for this device."""
    words = [sys.executable, arguments.timm / "train.py", "--data-dir", photos, "--output", output, *TIMM.split()]
    words += ["--model", arguments.model, "-b", arguments.batch_size, "--device", arguments.kind]
    words += ["--workers", arguments.num_workers, "--log-interval", arguments.report_every]
    words += ["--pin-mem"] if arguments.kind == "cuda" else []
    words += ["--torchcompile"] if arguments.compile else []
    return list(map(str, words))


def halfstep_command(arguments: argparse.Namespace, photos: Path, output: Path) -> list[str]:
    """Return the command that runs halfstep with the same recipe."""
    recipe = ROOT / f"configs/{arguments.model}.yaml"
    model = [] if recipe.exists() else [f"MODEL.NAME={arguments.model}"]
    recipe = recipe if recipe.exists() else ROOT / "configs/timm.yaml"
    words = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", recipe, "-dataset", "imagefolder"]
    words += ["-data_path", photos, "-output", output, "-amp", "-amp_dtype", "bfloat16", "-epochs", 1]
    words += ["-batch_size", arguments.batch_size, "-num_workers", arguments.num_workers]
    words += ["-compile"] if arguments.compile else []
    words += ["-opts", f"REPORT_FREQ={arguments.report_every}", *model, *OURS.split()]
    return list(map(str, words))


@dataclass
class Run:
    """The figures of one run of halfstep or of timm's train.py."""

    seconds: float
    first_step: float  # seconds from the start of the command to the log line of the first update
    images_per_second: float  # between the first and the last update
    top1: float  # validation accuracy in percent


def compare_runs(arguments: argparse.Namespace, scratch: Path) -> None:
    """Compare halfstep with timm's train.py, started by the commands that users type.

    Each run trains for one epoch and validates, in bfloat16.
    """
    arguments.kind, _ = find_devices("auto")
    arguments.num_workers = arguments.num_workers or len(available_cores())
    arguments.batch_size = batch_size = arguments.batch_size or (BATCH_SIZE if arguments.kind == "cpu" else 256)
    # On a GPU, a line per update would distort the timing.
    arguments.report_every = 1 if arguments.kind == "cpu" else 10
    if not (photos := arguments.photos):
        photos, count = scratch / "photos", 38 * batch_size
        make_photos(photos, count, count // 4, num_drawn=1220)
    timm_words = timm_command(arguments, photos, scratch / "timm")
    own_words = halfstep_command(arguments, photos, scratch / "halfstep")
    commands = {
        "timm's train.py": (timm_words, "--seed", r"Train: 0 \[ *(\d+)/", r"Best metric: ([0-9.]+)"),
        "halfstep": (own_words, "-seed", r"Step\[(\d+)/", r"best validation top-1 ([0-9.]+)%"),
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for seed, (name, (command, flag, step, top1)) in itertools.product(range(arguments.rounds), commands.items()):
        words = [*command[:2], flag, str(seed), *command[2:]]  # the seed precedes -opts, which takes all words after it
        runs[name].append(time_run(words, step, top1, batch_size))
        print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    first = runs["timm's train.py"]
    rows = []
    for name, own in runs.items():
        row = [name]
        for field, more_is_faster in (("images_per_second", True), ("seconds", False), ("first_step", False)):
            values, others = ([getattr(run, field) for run in each] for each in (own, first))
            ratios = [(a / b if more_is_faster else b / a) for a, b in zip(values, others, strict=True)]
            row += [spread(values), "1" if own is first else spread(ratios, 2)]
        rows.append([*row, spread([run.top1 for run in own])])
    columns = ["run", "images/s", "x", "whole run, s", "x faster", "first step after, s", "x faster", "top-1, %"]
    facts = [arguments.model, f"batch {batch_size}", counted(arguments.num_workers, "loader worker")]
    facts += ["compiled"] if arguments.compile else []
    print(table(", ".join([*facts, counted(arguments.rounds, "round")]), columns, rows))
    print("commands:\n\n" + "\n".join(" ".join(command) for command, *_ in commands.values()))


def time_run(command: list[str], step: str, top1: str, batch_size: int) -> Run:
    """Run a command. Return its figures, read from its output with the patterns `step` and `top1`."""
    begin = time.perf_counter()
    times, lines = {}, []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    with process:
        for line in process.stdout:
            lines.append(line)
            if match := re.search(step, line):
                times[int(match[1])] = time.perf_counter() - begin
    seconds, accuracies = time.perf_counter() - begin, re.findall(top1, "".join(lines))
    if process.returncode or len(times) < 2 or not accuracies:
        sys.exit("".join(lines[-40:]))
    first, last = min(times), max(times)
    rate = batch_size * (last - first) / (times[last] - times[first])
    return Run(seconds, times[first], rate, float(accuracies[-1]))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
