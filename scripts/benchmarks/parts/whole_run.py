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

BATCH_SIZE = 32
# The same recipe for both: ViT-Tiny, one epoch, bfloat16, AdamW, crops and flips, a line of the log for each update.
TIMM = """--model vit_tiny_patch16_224 --num-classes 10 --epochs 1 --warmup-epochs 0 --sched step --decay-epochs 9 --opt adamw --lr 1e-3
--weight-decay 0.05 --amp --amp-dtype bfloat16 --device cpu --workers 2 --color-jitter 0 --log-interval 1"""
OURS = f"""-cfg {ROOT}/configs/vit_tiny_patch16_224.yaml -dataset imagefolder -amp -epochs 1
-opts REPORT_FREQ=1 TRAIN.WARMUP_EPOCHS=0 TRAIN.LR_SCHEDULER.NAME=constant TRAIN.BASE_LR=1e-3 TRAIN.WEIGHT_DECAY=0.05
TRAIN.SMOOTHING=0.1 TRAIN.GRAD_CLIP=null MODEL.DROPOUT=0 MODEL.ATTENTION_DROPOUT=0 DATA.CROP_PCT=0.9"""


@dataclass
class Run:
    """One run by the entry script of ours or timm's."""

    seconds: float
    first_step: float  # seconds from the command until the first update is told
    images_per_second: float  # from the first update to the last
    top1: float  # of the validation images, per cent


def compare_runs(arguments: argparse.Namespace, scratch: Path) -> None:
    """ViT-Tiny, batch 32, bfloat16, one epoch with validation, both as people type them."""
    num_train = len(list((arguments.photos / "train").rglob("*.jpg")))
    num_steps = num_train // BATCH_SIZE
    photos, output = arguments.photos, scratch / "runs"
    theirs = [sys.executable, arguments.timm / "train.py", "--data-dir", photos, "--output", output / "timm"]
    theirs += f"-b {BATCH_SIZE} {TIMM}".split() + [f"--{flag}" for flag in arguments.timm_flags]
    ours = [sys.executable, ROOT / "main_single_gpu.py", "-data_path", photos, "-output", output / "halfstep"]
    ours += f"-batch_size {BATCH_SIZE} {OURS}".split()
    commands = {
        "timm's train.py": (theirs, "--seed", r"Train: 0 \[", r"Best metric: ([0-9.]+)"),
        "halfstep": (ours, "-seed", r"Step\[", r"best validation top-1 ([0-9.]+)%"),
    }
    found: dict[str, list[Run]] = {name: [] for name in commands}
    for seed, (name, (command, flag, step, top1)) in itertools.product(range(arguments.rounds), commands.items()):
        # Before -opts, which takes all that follows.
        found[name].append(time_run([*command[:2], flag, seed, *command[2:]], step, top1, num_steps))
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
    print(Table("", columns, rows).markdown())
    print("commands:\n\n" + "\n".join(" ".join(map(str, command)) for command, *_ in commands.values()))


def time_run(command: list, step: str, top1: str, num_steps: int) -> Run:
    """By the lines that it prints, one for each update, and one with the accuracy."""
    begin = time.perf_counter()
    times, lines = [], []
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    with process:
        for line in process.stdout:
            lines.append(line)
            if re.search(step, line):
                times.append(time.perf_counter() - begin)
    seconds, found = time.perf_counter() - begin, re.findall(top1, "".join(lines))
    if process.returncode or len(times) < num_steps or not found:
        sys.exit("".join(lines[-40:]))
    times = times[:num_steps]
    return Run(seconds, times[0], BATCH_SIZE * (len(times) - 1) / (times[-1] - times[0]), float(found[-1]))
