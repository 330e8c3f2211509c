"""The tables of other systems' AMP benchmarks, for this machine: as Markdown, and with -png FILE as a chart.

python scripts/benchmarks/amp.py seconds   seconds per 100 iterations, seven times, without and with -amp (PaddleViT)
python scripts/benchmarks/amp.py modes     memory, iterations/s, images/s in every precision (ColossalAI's ViT example)
python scripts/benchmarks/amp.py linear    three Linear layers, AMP, and AMP with accumulation (Paddle's tutorial)
python scripts/benchmarks/amp.py largest   the largest batch that fits (a PyTorch tutorial's point)

Not given, -cfg and -batch_size are ViT-Base and 128 on a GPU, ViT-Tiny and 32 on a CPU; -opts PRECISION.DTYPE=bfloat16
says which half type -amp means. A command's -h lists its flags.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from engine.memory.largest_batch import bisect
from scripts.benchmarks.parts.common import (
    GIB,
    MODES,
    SLOW_ON_CPUS,
    Panel,
    Refused,
    StepWorker,
    Table,
    machine,
    spread,
)
from scripts.benchmarks.parts.largest_batch import climb
from scripts.benchmarks.parts.recipe import device_kind, settings
from scripts.benchmarks.parts.speed import speed_table
from scripts.benchmarks.parts.turns import Turns, add_turn_flags, take_turns
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError, did_you_mean
from utils.program import exit_code


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    seconds = add_command(commands, "seconds", measure_seconds, "rounds:7")
    seconds.add_argument(
        "-iterations", type=at_least(1), default=100, metavar="N", help="of a turn, scaled to 100 [100]"
    )
    modes = add_command(commands, "modes", measure_modes, "rounds:5 modes")
    add_turn_flags(modes)
    modes.add_argument("-at_once", type=at_least(2), default=4, metavar="N", help="processes, fp32's among them [4]")
    modes.add_argument("-compile", nargs="?", const="true", choices=("true", "false"), help="too [on GPUs only]")
    linear = add_command(commands, "linear", measure_linear, "rounds:5")
    linear.add_argument("-scale", type=float, metavar="X", help="of width 4096 and batch 512 [GPU: 1, CPU: 0.25]")
    linear.add_argument("-epochs", type=at_least(1), metavar="N", help="of 50 batches [GPU: 25, CPU: 5]")
    largest = add_command(commands, "largest", measure_largest, "modes")
    largest.add_argument("-memory_gb", type=float, metavar="GB", help="limit in GiB [GPU: all of it; CPU: required]")
    largest.add_argument("-most", type=at_least(1), default=65536, metavar="N", help="largest batch to try [65536]")
    arguments = parser.parse_args(argv)
    table = arguments.measure(arguments)
    print(table.markdown())
    if arguments.png:
        table.draw(arguments.png)
    return 0


def add_command(commands, name: str, measure: Callable, extras: str) -> argparse.ArgumentParser:
    """A command with the flags that all have; `extras`: those that only some have."""
    command = commands.add_parser(name, help=measure.__doc__.splitlines()[0], description=measure.__doc__)
    command.set_defaults(measure=measure)
    command.add_argument("-cfg", metavar="FILE", help="settings of the run")
    command.add_argument("-batch_size", type=at_least(1), metavar="N")
    command.add_argument("-dataset", default="synthetic", metavar="NAME", help="[synthetic]")
    command.add_argument("-data_path", metavar="PATH")
    command.add_argument("-png", type=Path, metavar="FILE", help="also draw the table as a chart")
    command.add_argument("-opts", nargs="+", default=[], metavar="KEY=VALUE", help="further settings")
    for extra in extras.split():
        if extra == "modes":
            command.add_argument(
                "-modes", nargs="+", metavar="MODE", help=f"of {' '.join(MODES)} [all; on CPUs the fast]"
            )
        else:
            default = int(extra.removeprefix("rounds:"))
            command.add_argument("-rounds", type=at_least(1), default=default, metavar="N", help=f"turns [{default}]")
    return command


def worker_flags(arguments: argparse.Namespace, kind: str, options: tuple[str, ...], batch_size=None) -> list[str]:
    """The command line of a StepWorker; the mode's own options win over the user's."""
    cfg, usual = settings(arguments, kind)
    batch_size = batch_size or usual
    flags = ["-cfg", cfg, "-dataset", arguments.dataset, "-batch_size", str(batch_size)]
    flags += ["-data_path", arguments.data_path] if arguments.data_path else []
    flags += ["-opts", f"DATA.SYNTHETIC_SIZE={20 * batch_size}", *arguments.opts, *options]
    return flags


def heading(arguments: argparse.Namespace, kind: str, what: str, machine: str) -> str:
    cfg, batch_size = settings(arguments, kind)
    data = "synthetic data" if arguments.dataset == "synthetic" else arguments.dataset
    return f"{Path(cfg).stem}, batch {batch_size}, {data}, {what}. {machine}"


def measure_seconds(arguments: argparse.Namespace) -> Table:
    """Seconds per 100 iterations, without and with -amp in turn, average and speed-up."""
    kind = device_kind(arguments)
    flags = {"off": "AMP=false", "on": "AMP=true"}
    workers = {name: StepWorker(worker_flags(arguments, kind, (option,))) for name, option in flags.items()}
    measured, reasons = take_turns(workers, Turns(arguments.rounds, arguments.iterations))
    for name, reason in reasons.items():
        raise ConfigError(f"AMP {name} cannot be measured: {reason}")
    averages = {name: 100 * statistics.mean(each.seconds) for name, each in measured.items()}
    rows = []
    for name, each in measured.items():
        turns = " ".join(f"{100 * seconds:.2f}" for seconds in each.seconds)
        rows.append([name, turns, f"{averages[name]:.2f}", f"{averages['off'] / averages[name]:.3f}"])
    scaled = arguments.iterations != 100
    what = "seconds per 100 iterations" + (f", scaled up from {arguments.iterations}" if scaled else "")
    return Table(
        heading(arguments, kind, what, measured["off"].hello["machine"]),
        ["AMP", "seconds per 100 iterations", "average", "speed-up"],
        rows,
        panels=[Panel(f"seconds per 100 iterations, average of {arguments.rounds}", averages)],
    )


def choose_modes(arguments: argparse.Namespace, kind: str) -> tuple[list[str], dict[str, str]]:
    """What to measure here, and why not the rest."""
    for name in arguments.modes or ():
        if name not in MODES:
            raise ConfigError(
                f"-modes: there is no mode {name!r} (there are {', '.join(MODES)}){did_you_mean(name, MODES)}"
            )
    reasons = {}
    for name in arguments.modes or MODES:
        if kind not in MODES[name].kinds:
            reasons[name] = f"only on {' and '.join(MODES[name].kinds)}"
        elif kind == "cpu" and name in SLOW_ON_CPUS and not arguments.modes:
            reasons[name] = f"not measured: minutes for one update on a CPU; -modes {name} measures it"
    return [name for name in arguments.modes or MODES if name not in reasons], reasons


def measure_modes(arguments: argparse.Namespace) -> Table:
    """Memory, iterations/s, images/s and speed-up in every precision, with and without compile, in turn.

    Utilisation is 3 x the FLOPs of a forward pass, by images/s: of the best square matrix multiplication in the same
    type, timed in the same run, and of the maker's figure where the device is one that is known.
    """
    kind = device_kind(arguments)
    names, unfit = choose_modes(arguments, kind)
    compiles = [False, True] if (arguments.compile or str(kind == "cuda").lower()) == "true" else [False]
    cases = {f"{name}{' compiled' * compiled}": (MODES[name], compiled) for compiled in compiles for name in names}
    workers = {
        case: StepWorker(worker_flags(arguments, kind, (*mode.options, f"COMPILE={compiled}")))
        for case, (mode, compiled) in cases.items()
    }
    turns = Turns(arguments.rounds, arguments.steps, arguments.seconds, arguments.at_once)
    peaks = {case: mode.peak for case, (mode, compiled) in cases.items() if not compiled}
    measured, reasons = take_turns(workers, turns, peaks)
    where = next((each.hello["machine"] for each in measured.values()), machine(kind))
    title = heading(arguments, kind, f"{turns}, medians (least to most)", where)
    return speed_table(title, {case: mode.peak for case, (mode, _) in cases.items()}, measured, reasons | unfit)


def measure_linear(arguments: argparse.Namespace) -> Table:
    """Three Linear layers in fp32, with AMP, and with AMP and accumulation over 10 batches: seconds and last losses."""
    from scripts.benchmarks.parts.paddle_mlp import CASES, Sizes, case_config, train

    kind = device_kind(arguments)
    scale, epochs = (0.25, 5) if kind == "cpu" else (1.0, 25)  # the tutorial's 5 take a fast GPU 0.2 s
    sizes = Sizes.scaled(arguments.scale or scale, arguments.epochs or epochs)
    results = {name: [] for name in CASES}
    configs = {name: case_config(name, settings(arguments, kind)[0], arguments.opts) for name in CASES}
    for name, config in configs.items():
        train(name, config, sizes.warm_up(), kind)
    for _ in range(arguments.rounds):
        for name, config in configs.items():
            results[name].append(train(name, config, sizes, kind))
    medians = {name: statistics.median(seconds for seconds, _ in each) for name, each in results.items()}
    rows = []
    for name, each in results.items():
        seconds = spread([seconds for seconds, _ in each], 3)
        rows.append([name, seconds, f"{medians['fp32'] / medians[name]:.2f}", f"{each[-1][1]:.4f}"])
    title = f"three Linear layers of {sizes.width}, batch {sizes.batch}, {sizes.batches} batches, {sizes.epochs} epochs"
    return Table(
        f"{title}, {arguments.rounds} turns. {machine()}",
        ["case", "seconds, median (least to most)", "speed-up", "last loss"],
        rows,
        panels=[Panel("seconds", medians)],
    )


def measure_largest(arguments: argparse.Namespace) -> Table:
    """The largest batch that fits in each precision: a multiple of 8, found and run in separate processes."""
    kind = device_kind(arguments)
    names, reasons = choose_modes(arguments, kind)
    arguments.dataset, arguments.data_path = "synthetic", None  # memory does not depend on the images
    limit = arguments.memory_gb
    if kind != "cuda" and limit is None:
        raise ConfigError(f"-memory_gb: needed on {kind}, which has no memory of its own to fill; as in -memory_gb 4")
    found = {}
    for name in names:
        flags = partial(worker_flags, arguments, kind, MODES[name].options)
        try:
            if kind == "cuda":
                start = settings(arguments, kind)[1]
                found[name] = bisect(lambda size: peak(flags(size), limit, 3), start, arguments.most)  # noqa: B023
            else:
                found[name] = climb(lambda size: peak(flags(size), limit, 1), limit * GIB, arguments.most)  # noqa: B023
        except Refused as error:
            reasons[name] = str(error)
    base = found["fp32"].batch_size if "fp32" in found else 0
    rows = []
    for name, each in found.items():
        against = f"{each.batch_size / base:.2f}" if base else "-"
        rows.append([name, str(each.batch_size), f"{each.memory / GIB:.3f}", against, str(each.runs)])
    rows += [[name, reason, "-", "-", "-"] for name, reason in reasons.items()]
    within = f"within {limit:g} GiB" if limit else "of the device's memory"
    return Table(
        f"{Path(settings(arguments, kind)[0]).stem}, largest batch {within}, synthetic data. {machine()}",
        ["mode", "largest batch", "its peak, GiB", "against fp32", "batch sizes run"],
        rows,
        panels=[Panel("largest batch", {name: each.batch_size for name, each in found.items()})],
    )


def peak(flags: list[str], limit: float | None, warm_up: int) -> int | None:
    """Bytes at that batch size; None if it does not fit. The second update also contains the optimizer's state.

    `warm_up`: updates before it; float16 on CUDA may skip the first.
    """
    worker = StepWorker(flags, limit)
    try:
        worker.iterate(1, warm_up)
        return worker.peak_memory()
    except Refused as error:
        if error.out_of_memory:
            return None
        raise
    finally:
        worker.close()


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
