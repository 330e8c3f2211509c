"""Measures halfstep on this machine and prints Markdown tables: what BENCHMARKS.md holds.

python scripts/benchmarks/step.py amp      one model's step in float32 and with -amp, in turn: images/s, ratio, memory
python scripts/benchmarks/step.py peer     the same model in the plain loop of timm's train.py and here, both in bfloat16
python scripts/benchmarks/step.py start    from the command to the first training step, against importing the libraries
python scripts/benchmarks/step.py save     an epoch with a checkpoint every so many updates and one without, in turn

The tables of other systems' AMP benchmarks come from amp.py, the accuracy in each precision from parity.py.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from scripts.benchmarks.parts.common import ROOT, StepWorker, machine, spread
from scripts.benchmarks.parts.recipe import device_kind, settings
from scripts.benchmarks.parts.turns import Turns, add_turn_flags, take_turns
from scripts.command_line import Parser, at_least
from utils.program import exit_code


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("amp", "peer"):
        steps = commands.add_parser(name)
        steps.add_argument("-cfg", help="[ViT-Base on a GPU, ViT-Tiny on a CPU]")
        steps.add_argument("-batch_size", type=at_least(1), help="[128 on a GPU, 32 on a CPU]")
        steps.add_argument("-rounds", type=at_least(1), default=7)
        steps.add_argument("-opts", nargs="*", default=[], help="further settings, KEY=VALUE")
        add_turn_flags(steps)
    start = commands.add_parser("start")
    start.add_argument("-rounds", type=at_least(1), default=5)
    save = commands.add_parser("save")
    save.add_argument("-cfg", default=str(ROOT / "configs/vit_small_patch16_224.yaml"))
    save.add_argument("-batch_size", type=at_least(1), default=32)
    save.add_argument("-rounds", type=at_least(1), default=3)
    save.add_argument("-every", type=at_least(1), default=100, help="updates between two checkpoints")
    save.add_argument("-steps", type=at_least(1), default=400, help="updates of the epoch that is timed")
    save.add_argument("-opts", nargs="*", default=[], help="further settings, KEY=VALUE")
    arguments = parser.parse_args(argv)
    if arguments.command in ("amp", "peer"):
        arguments.cfg, arguments.batch_size = settings(arguments, device_kind(arguments))
    print(machine() + "\n", flush=True)
    {"amp": compare_amp, "peer": compare_peer, "start": time_start, "save": time_saving}[arguments.command](arguments)
    return 0


def compare_amp(arguments: argparse.Namespace) -> None:
    """A process for each precision, so that each has its own memory peak; they take turns."""
    flags = step_flags(arguments, [])
    compare(arguments, {"float32": StepWorker(flags), "-amp": StepWorker(["-amp", *flags])})


def compare_peer(arguments: argparse.Namespace) -> None:
    """timm's model in timm's own step against ours, both in bfloat16, with attention as each chooses it."""
    no_dropout = ["MODEL.DROPOUT=0", "MODEL.ATTENTION_DROPOUT=0", "MODEL.DROPPATH=0"]  # as timm's models come
    flags = step_flags(arguments, ["AMP=true", "PRECISION.DTYPE=bfloat16", *no_dropout])
    compare(arguments, {"timm": StepWorker(flags, role="timm"), "halfstep": StepWorker(flags)})


def step_flags(arguments: argparse.Namespace, options: list[str]) -> list:
    flags = ["-cfg", arguments.cfg, "-dataset", "synthetic", "-batch_size", arguments.batch_size]
    return [*flags, "-opts", f"DATA.SYNTHETIC_SIZE={20 * arguments.batch_size}", *options, *arguments.opts]


def compare(arguments: argparse.Namespace, workers: dict[str, StepWorker]) -> None:
    """A table of both, the first being what the second is held against."""
    turns = Turns(arguments.rounds, arguments.steps, arguments.seconds)
    measured, reasons = take_turns(workers, turns, tensors=True)
    if reasons:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in reasons.items()))
    first = next(iter(measured))  # what the other is held against
    before = measured[first]
    words = [f"batch {arguments.batch_size}", "synthetic data", *arguments.opts, str(turns)]
    print(f"{Path(arguments.cfg).stem}, {', '.join(words)}\n")
    columns = ["", "images/s, median (spread)", "x", "peak memory, MB", "x", "of it tensors, MB", "x"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, each in measured.items():
        ratio = "1" if name == first else spread(each.ratios, 2)
        row = [name, spread(each.images_per_second), ratio]
        for mine, its in ((each.memory, before.memory), (each.tensors, before.tensors)):
            row += [f"{mine / 2**20:.0f}", f"{mine / its:.2f}"]
        print(f"| {' | '.join(row)} |")


def time_start(arguments: argparse.Namespace) -> None:
    """Both commands in turn; the step itself is taken off ours."""
    imports, starts = [], []
    with tempfile.TemporaryDirectory() as output:
        for _ in range(arguments.rounds):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch, torchvision, timm"], check=True)
            imports.append(time.perf_counter() - begin)
            starts.append(seconds_to_first_step(output))
    ratios = [ours / theirs for ours, theirs in zip(starts, imports, strict=True)]
    print("| | seconds, median (spread) | ratio |")
    print("|---|---|---|")
    print(f"| python -c 'import torch, torchvision, timm' | {spread(imports, 2)} | 1 |")
    print(f"| from the command to the first step on digits | {spread(starts, 2)} | {spread(ratios, 2)} |")


def seconds_to_first_step(output: str) -> float:
    """Until the line of the first step, less the time of that step, which the line after the epoch does not tell."""
    command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", ROOT / "configs/vit_digits.yaml"]
    command += ["-amp", "-output", output, "-epochs", "1", "-opts", "REPORT_FREQ=1"]
    begin = time.perf_counter()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        times = [time.perf_counter() - begin for line in process.stdout if "Step[" in line]
    # The second step is the measure of a step: the first also makes the optimizer's state, which is starting up.
    return times[0] - (times[1] - times[0])


def time_saving(arguments: argparse.Namespace) -> None:
    """What checkpoints cost: the time that training stood still for them, and all that they made an epoch longer."""
    without, with_saves, still = [], [], []
    for _ in range(arguments.rounds):
        without.append(seconds_of_epoch(arguments, [])[0])
        seconds, stood_still = seconds_of_epoch(arguments, [f"SAVE_STEPS={arguments.every}"])
        with_saves.append(seconds)
        still.append(100 * stood_still / seconds)
    longer = [100 * (after / before - 1) for before, after in zip(without, with_saves, strict=True)]
    print(f"{Path(arguments.cfg).stem}, batch {arguments.batch_size}, {arguments.steps} updates, synthetic data\n")
    print("| a checkpoint | seconds, median (spread) | longer by, % | stood still, % |")
    print("|---|---|---|---|")
    print(f"| after the epoch only | {spread(without)} | - | - |")
    print(f"| every {arguments.every} updates | {spread(with_saves)} | {spread(longer, 2)} | {spread(still, 3)} |")


def seconds_of_epoch(arguments: argparse.Namespace, options: list[str]) -> tuple[float, float]:
    """Of training in a run of one epoch, and of these for saving; the save after the epoch is among the second."""
    num_images = arguments.steps * arguments.batch_size
    options = [f"DATA.SYNTHETIC_SIZE={num_images}", "TRAIN.ACCUM_ITER=1", *options, *arguments.opts]
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", arguments.cfg, "-dataset", "synthetic"]
        command += ["-batch_size", arguments.batch_size, "-epochs", 1, "-output", output, "-opts", *options]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        (log,) = Path(output).glob("*/log.txt")
        text = log.read_text()
    return tuple(
        float(re.search(words, text)[1]) for words in (r"Train Acc: .*time: (\S+)", r"blocked training for (\S+)")
    )


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
