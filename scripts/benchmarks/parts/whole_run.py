"""A whole run by main_single_gpu.py against one by timm's train.py, as loader.py run compares them."""

import argparse
import itertools
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.parts.common import ROOT, Table, spread
from scripts.command_line import at_least
from utils.distributed import find_devices
from utils.errors import ConfigError
from utils.host import available_cores
from utils.text import counted

BATCH_SIZE = 32  # on a CPU

# The same recipe for both: one epoch, bfloat16, AdamW, crops and flips.
TIMM = """--num-classes 10 --epochs 1 --warmup-epochs 0 --sched step --decay-epochs 9 --opt adamw --lr 1e-3
--weight-decay 0.05 --amp --amp-dtype bfloat16 --color-jitter 0"""
OURS = """TRAIN.WARMUP_EPOCHS=0 TRAIN.LR_SCHEDULER.NAME=constant TRAIN.BASE_LR=1e-3 TRAIN.LINEAR_SCALED_LR=null
TRAIN.WEIGHT_DECAY=0.05 TRAIN.SMOOTHING=0.1 TRAIN.GRAD_CLIP=null TRAIN.MODEL_EMA=false MODEL.DROPOUT=0
MODEL.ATTENTION_DROPOUT=0 DATA.CROP_PCT=0.9"""


@dataclass(frozen=True)
class Setup:
    """What both sides are given: what this machine has, unless flags say otherwise."""

    model: str
    kind: str  # of device
    workers: int
    batch_size: int
    is_compiled: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Setup":
        kind, _ = find_devices("auto")
        workers = arguments.num_workers or len(available_cores())
        batch_size = arguments.batch_size or (BATCH_SIZE if kind == "cpu" else 256)
        return cls(arguments.model, kind, workers, batch_size, arguments.compile)

    @property
    def report_every(self) -> int:
        """Updates between two lines of the log: one that stops a GPU after each update would be what is measured."""
        return 1 if self.kind == "cpu" else 10

    def timm(self, folder: Path, photos: Path, output: Path) -> list[str]:
        """The command with timm's own flags for this device."""
        words = [sys.executable, folder / "train.py", "--data-dir", photos, "--output", output, *TIMM.split()]
        words += ["--model", self.model, "-b", self.batch_size, "--device", self.kind, "--workers", self.workers]
        words += ["--log-interval", self.report_every]
        words += ["--pin-mem"] if self.kind == "cuda" else []
        words += ["--channels-last"] if self.is_convnet() else []
        words += ["--torchcompile"] if self.is_compiled else []
        return list(map(str, words))

    def halfstep(self, photos: Path, output: Path) -> list[str]:
        recipe = ROOT / f"configs/{self.model}.yaml"
        model = [] if recipe.exists() else [f"MODEL.NAME={self.model}"]
        words = [
            sys.executable,
            ROOT / "main_single_gpu.py",
            "-cfg",
            recipe if recipe.exists() else ROOT / "configs/timm.yaml",
        ]
        words += ["-dataset", "imagefolder", "-data_path", photos, "-output", output, "-amp", "-amp_dtype", "bfloat16"]
        words += ["-epochs", 1, "-batch_size", self.batch_size, "-num_workers", self.workers]
        words += ["-compile"] if self.is_compiled else []
        return list(map(str, [*words, "-opts", f"REPORT_FREQ={self.report_every}", *model, *OURS.split()]))

    def is_convnet(self) -> bool:
        import timm

        from scripts.benchmarks.parts.worker import is_convnet

        return is_convnet(timm.create_model(self.model))


@dataclass
class Run:
    """One run by the entry script of ours or timm's."""

    seconds: float
    first_step: float  # seconds from the command until the first update is told
    images_per_second: float  # from the first update to the last
    top1: float  # of the validation images, per cent


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-timm", type=Path, required=True, help="a copy of timm's repository, with train.py")
    parser.add_argument("-timm_flags", nargs="*", default=[], help="further flags of train.py, without dashes")
    parser.add_argument("-model", default="vit_tiny_patch16_224", help="a name of timm's [vit_tiny_patch16_224]")
    parser.add_argument("-batch_size", type=at_least(1), help=f"of both [{BATCH_SIZE} on CPUs, 256 on others]")
    parser.add_argument("-num_workers", type=at_least(1), help="of both: threads here, processes there [the cores]")
    parser.add_argument("-compile", action="store_true", help="both")


def compare_runs(arguments: argparse.Namespace, scratch: Path) -> None:
    """One epoch with validation, in bfloat16, both as people type them."""
    setup, output = Setup.of(arguments), scratch / "runs"
    num_train = sum(1 for _ in (arguments.photos / "train").rglob("*.jpg"))
    if num_train < 2 * setup.batch_size:
        raise ConfigError(
            f"-photos: {num_train} training images are less than two batches; make more, or lower -batch_size"
        )
    theirs = setup.timm(arguments.timm, arguments.photos, output / "timm")
    theirs += [f"--{flag}" for flag in arguments.timm_flags]
    ours = setup.halfstep(arguments.photos, output / "halfstep")
    commands = {
        "timm's train.py": (theirs, "--seed", r"Train: 0 \[ *(\d+)/", r"Best metric: ([0-9.]+)"),
        "halfstep": (ours, "-seed", r"Step\[(\d+)/", r"best validation top-1 ([0-9.]+)%"),
    }
    found: dict[str, list[Run]] = {name: [] for name in commands}
    for seed, (name, (command, flag, step, top1)) in itertools.product(range(arguments.rounds), commands.items()):
        # Before -opts, which takes all that follows.
        words = [*command[:2], flag, str(seed), *command[2:]]
        found[name].append(time_run(words, step, top1, setup.batch_size))
        print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    first = found["timm's train.py"]
    rows = []
    for name, runs in found.items():
        row = [name]
        for field, faster in (("images_per_second", True), ("seconds", False), ("first_step", False)):
            values, others = ([getattr(run, field) for run in each] for each in (runs, first))
            ratios = [(a / b if faster else b / a) for a, b in zip(values, others, strict=True)]
            row += [spread(values), "1" if runs is first else spread(ratios, 2)]
        rows.append([*row, spread([run.top1 for run in runs])])
    columns = ["run", "images/s", "x", "whole run, s", "x faster", "first step after, s", "x faster", "top-1, %"]
    title = f"{setup.model}, batch {setup.batch_size}, {counted(setup.workers, 'loader worker')}, {counted(arguments.rounds, 'round')}"
    print(Table(title + ", compiled" * setup.is_compiled, columns, rows).markdown())
    print("commands:\n\n" + "\n".join(" ".join(command) for command, *_ in commands.values()))


def time_run(command: list[str], step: str, top1: str, batch_size: int) -> Run:
    """By the lines that it prints: of the first update, of some between, of the last, and one with the accuracy."""
    begin = time.perf_counter()
    times, lines = {}, []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    with process:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(step, line):
                times[int(found[1])] = time.perf_counter() - begin
    seconds, accuracies = time.perf_counter() - begin, re.findall(top1, "".join(lines))
    if process.returncode or len(times) < 2 or not accuracies:
        sys.exit("".join(lines[-40:]))
    first, last = min(times), max(times)
    rate = batch_size * (last - first) / (times[last] - times[first])
    return Run(seconds, times[first], rate, float(accuracies[-1]))
