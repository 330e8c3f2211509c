"""Measures the training step on this machine and prints the Markdown tables of BENCHMARKS.md.

python scripts/benchmarks/step.py modes    memory, iterations/s, images/s in each precision (ColossalAI's table)
python scripts/benchmarks/step.py seconds  seconds per 100 iterations, without and with -amp (PaddleViT's table)
python scripts/benchmarks/step.py linear   three Linear layers, AMP, and AMP with accumulation (Paddle's tutorial)
python scripts/benchmarks/step.py peer     halfstep and timm: the same model in the plain loop of timm's train.py

The defaults of -cfg and -batch_size are ViT-Base and 128 on a GPU, ViT-Tiny and 32 on a CPU. A command's -h lists its
flags. -opts PRECISION.DTYPE=bfloat16 sets the half type of -amp. parity.py measures the accuracy in each precision.
"""

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from engine.settings import load_settings
from scripts.benchmarks.common import (
    CASES,
    StepWorker,
    Turns,
    compare,
    fast_modes,
    machine,
    spread,
    table,
    take_turns,
)
from scripts.command_line import Parser, at_least
from utils.host import find_devices

NO_DROPOUT = ["MODEL.DROPOUT=0", "MODEL.ATTENTION_DROPOUT=0", "MODEL.DROPPATH=0"]  # the defaults of timm's models
KINDS = (("", "COMPILE=false"), (" compiled", "COMPILE=true"))  # (suffix of the case's name, its option)
AT_ONCE = 4  # number of processes; even a process that waits keeps its weights and its context on the device


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for measure in (modes, seconds, linear, peer):
        command = commands.add_parser(measure.__name__, help=measure.__doc__, description=measure.__doc__)
        command.set_defaults(measure=measure)
        command.add_argument("-cfg", metavar="FILE", help="settings [ViT-Base on a GPU, ViT-Tiny on a CPU]")
        command.add_argument("-batch_size", type=at_least(1), metavar="N", help="batch size [GPU 128, CPU 32]")
        command.add_argument("-opts", nargs="+", default=[], metavar="KEY=VALUE", help="further settings")
        rounds = 7 if measure in (modes, peer, seconds) else 5
        command.add_argument("-rounds", type=at_least(1), default=rounds, metavar="N", help=f"turns [{rounds}]")
        if measure in (modes, peer):
            command.add_argument("-steps", type=at_least(1), default=5, metavar="N", help="minimum steps per turn [5]")
            command.add_argument("-seconds", type=float, default=2.0, metavar="S", help="minimum seconds per turn [2]")
            command.add_argument("-compile", action="store_true", help="also measure each case compiled")
        elif measure is seconds:
            command.add_argument("-iterations", type=at_least(1), default=100, metavar="N", help="steps per turn [100]")
        elif measure is linear:
            scale_help = "factor for the width of 4096 and the batch size of 512 [GPU 1, CPU .25]"
            command.add_argument("-scale", type=float, metavar="X", help=scale_help)
            command.add_argument("-epochs", type=at_least(1), metavar="N", help="epochs of 50 batches [GPU 25, CPU 5]")
        if measure is modes:
            command.add_argument("-modes", nargs="+", choices=CASES, metavar="MODE", help=" ".join(CASES))
    arguments = parser.parse_args(argv)
    options = ["-opts", *arguments.opts] if arguments.opts else []
    # find_devices creates no CUDA context, which would take memory from the measured cases.
    arguments.kind, _ = find_devices(load_settings(["-cfg", "vit_tiny_patch16_224", *options]).config.DEVICE)
    size, batch_size = ("tiny", 32) if arguments.kind == "cpu" else ("base", 128)
    arguments.cfg = arguments.cfg or f"vit_{size}_patch16_224"
    arguments.batch_size = arguments.batch_size or batch_size
    print(arguments.measure(arguments))
    return 0


def worker(arguments: argparse.Namespace, *options: str, role: str = "step") -> StepWorker:
    """Return a worker on synthetic data. `options` override the user's -opts."""
    flags = ["-cfg", arguments.cfg, "-dataset", "synthetic", "-batch_size", arguments.batch_size]
    size = f"DATA.SYNTHETIC_SIZE={20 * arguments.batch_size}"
    return StepWorker([*flags, "-opts", size, *arguments.opts, *options], role)


def heading(arguments: argparse.Namespace, what: object) -> str:
    facts = [Path(arguments.cfg).stem, f"batch {arguments.batch_size}", "synthetic data", *arguments.opts, str(what)]
    return f"{', '.join(facts)}. {machine(arguments.kind)}"


def modes(arguments: argparse.Namespace) -> str:
    """Measure memory, iterations/s, images/s and utilisation in each precision. By default, CPUs skip slow modes."""
    names = arguments.modes or fast_modes(arguments.kind)
    reasons = {name: f"only on {CASES[name].kinds[0]}" for name in names if arguments.kind not in CASES[name].kinds}
    names = [name for name in names if name not in reasons]
    products, workers = {}, {}
    for ending, option in KINDS[: 1 + arguments.compile]:
        for name in names:
            products[name + ending] = CASES[name].product
            workers[name + ending] = worker(arguments, *CASES[name].options, option)
    return measure_cases(arguments, workers, products, reasons)


def peer(arguments: argparse.Namespace) -> str:
    """Compare halfstep with timm's model in timm's own step, both in bfloat16 without dropout, for BENCHMARKS.md."""
    options = ["AMP=true", "PRECISION.DTYPE=bfloat16", *NO_DROPOUT]
    workers = {}
    for ending, option in KINDS[: 1 + arguments.compile]:
        for name, role in (("timm", "timm"), ("halfstep", "step")):
            workers[name + ending] = worker(arguments, *options, option, role=role)
    print(f"## halfstep and timm\n\n`{shlex.join(['python', 'scripts/benchmarks/step.py', *sys.argv[1:]])}`:\n")
    return measure_cases(arguments, workers, dict.fromkeys(workers, "bfloat16"), {})


def measure_cases(
    arguments: argparse.Namespace, workers: dict[str, StepWorker], products: dict[str, str], reasons: dict[str, str]
) -> str:
    """Print the table of all cases, adding rows as soon as they are known. Return the text below the table.

    All cases are compared with the first. `products`: {case: type of its matrix products}. `reasons`: {case that this
    kind of device cannot compute: the reason}.
    """
    turns, base = Turns(arguments.rounds, arguments.steps, arguments.seconds), next(iter(workers), "-")
    columns = ["case", "memory, GiB", f"memory against {base}", "iterations/s", "images/s"]
    columns += [f"against {base}", "FLOPs utilisation, %"]
    print(table(heading(arguments, turns), columns, []).rstrip(), flush=True)
    show_rows([[name, reason, *["-"] * 5] for name, reason in reasons.items()])
    peaks: dict[str, float] = {}  # {type of matrix products: FLOP/s}
    flops, others = 0, [name for name in workers if name != base]
    for begin in range(0, max(len(others), 1), AT_ONCE - 1):
        group = [*workers][:1] + others[begin : begin + AT_ONCE - 1]
        measured, reasons = take_turns({name: workers[name] for name in group}, turns, products)
        peaks |= {products[name]: case.peak for name, case in measured.items()}
        flops = max([flops, *(3 * case.forward_flops for case in measured.values())])  # per training image
        rows = {name: [name, reason, *["-"] * 5] for name, reason in reasons.items()}
        for name, case in measured.items():
            memory = f"{case.memory / measured[base].memory:.2f}" if base in measured else "-"
            share = flops * statistics.median(case.images_per_second) / peaks[products[name]]
            rows[name] = [name, f"{case.memory / 2**30:.2f}", memory, f"{1 / statistics.median(case.seconds):.4g}"]
            rows[name] += [spread(case.images_per_second), spread(case.ratios, 2) if case.ratios else "-"]
            rows[name].append(f"{100 * share:.3g}")
        show_rows([row for name, row in rows.items() if name != base or begin == 0])
    speeds = ", ".join(f"{product} {peak / 1e9:.4g}" for product, peak in peaks.items())
    text = f"a training image takes {flops / 1e9:.4g} GFLOP (3 x forward)"
    return f"\nUtilisation: {text}; matrix products reach, in GFLOP/s: {speeds}.\n" if speeds else ""


def show_rows(rows: list[list[str]]) -> None:
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def seconds(arguments: argparse.Namespace) -> str:
    """Measure the seconds per 100 iterations without and with -amp in turn; compute the averages and the speed-up."""
    workers = {"off": worker(arguments, "AMP=false"), "on": worker(arguments, "AMP=true")}
    measured = compare(workers, Turns(arguments.rounds, arguments.iterations))
    averages = {name: 100 * statistics.mean(case.seconds) for name, case in measured.items()}
    rows = []
    for name, case in measured.items():
        turns = " ".join(f"{100 * seconds:.2f}" for seconds in case.seconds)
        rows.append([name, turns, f"{averages[name]:.2f}", f"{averages['off'] / averages[name]:.3f}"])
    scaled = f", scaled up from {arguments.iterations}" if arguments.iterations != 100 else ""
    title = heading(arguments, f"seconds per 100 iterations{scaled}")
    return table(title, ["AMP", "seconds per 100 iterations", "average", "speed-up"], rows)


# {case: (option, batches per update)}. With accumulation, the loss is divided by the number of batches, unlike in the
# tutorial.
LINEAR = {"fp32": ("AMP=false", 1), "AMP": ("AMP=true", 1), "AMP, accumulation over 10": ("AMP=true", 10)}


def linear(arguments: argparse.Namespace) -> str:
    """Measure three Linear layers in fp32, with AMP, and with AMP and accumulation over 10 batches."""
    is_slow = arguments.kind == "cpu"
    scale = arguments.scale or (0.25 if is_slow else 1.0)
    epochs = arguments.epochs or (5 if is_slow else 25)  # the tutorial's 5 epochs take 0.2 s on a fast GPU
    width, batch = (max(8, round(size * scale / 8) * 8) for size in (4096, 512))  # multiples of 8, for Tensor Cores
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in LINEAR}
    for round_number in range(-1, arguments.rounds):  # the first round only warms up
        for name, (option, accumulate) in LINEAR.items():
            config = load_settings(["-cfg", arguments.cfg, "-opts", *arguments.opts, option]).config
            steps = 50 * epochs if round_number >= 0 else 10
            result = train_linear(config, arguments.kind, (width, batch), steps, accumulate)
            results[name] += [result] if round_number >= 0 else []
    medians = {name: statistics.median(seconds for seconds, _ in pairs) for name, pairs in results.items()}
    rows = []
    for name, pairs in results.items():
        row = [name, spread([seconds for seconds, _ in pairs], 3)]
        rows.append([*row, f"{medians['fp32'] / medians[name]:.2f}", f"{pairs[-1][1]:.4f}"])
    title = f"three Linear layers of width {width}, batch {batch}, 50 batches, {epochs} epochs. {machine()}"
    return table(title, ["case", "seconds, median (minimum to maximum)", "speed-up", "last loss"], rows)


def train_linear(config, kind: str, sizes: tuple[int, int], steps: int, accumulate: int) -> tuple[float, float]:
    """Train from the same initial weights on the same data in every case. Return the seconds and the last loss."""
    import torch
    from torch import nn

    from engine.precision import Precision, set_matmul

    width, batch = sizes
    device = torch.device(kind)
    precision = Precision(config, device)
    set_matmul(config.PRECISION.MATMUL)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    net.to(device)
    batches = [torch.randn(2, batch, width).to(device) for _ in range(10)]  # used in turn
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, fused=True)  # without fused, the scaler waits for the device
    torch.ones((), device=device).item()  # waits for the device
    begin = time.perf_counter()
    for step in range(steps):
        images, targets = batches[step % len(batches)]
        with precision.autocast():
            output = net(images)
        loss = nn.functional.mse_loss(output.float(), targets)
        precision.scaler.scale(loss / accumulate).backward()
        if (step + 1) % accumulate == 0:  # 10 divides the number of batches, so no batch is left over
            precision.scaler.step(optimizer)
            precision.scaler.update()
            optimizer.zero_grad(set_to_none=True)
    last_loss = loss.item()  # waits for the device
    return time.perf_counter() - begin, last_loss


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
