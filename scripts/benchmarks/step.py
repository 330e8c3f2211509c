"""Measures the training step on this machine and prints Markdown tables: what BENCHMARKS.md holds.

python scripts/benchmarks/step.py modes    memory, iterations/s, images/s in each precision, in turn (ColossalAI's table)
python scripts/benchmarks/step.py seconds  seconds per 100 iterations, seven times, without and with -amp (PaddleViT's table)
python scripts/benchmarks/step.py linear   three Linear layers, AMP, and AMP with accumulation (Paddle's tutorial)
python scripts/benchmarks/step.py peer     the same model in the plain loop of timm's train.py and here, both in bfloat16
python scripts/benchmarks/step.py start    from the command to the first training step, against importing the libraries
python scripts/benchmarks/step.py save     an epoch with a checkpoint every so many updates and one without, in turn

Without -cfg and -batch_size these are ViT-Base and 128 on a GPU, ViT-Tiny and 32 on a CPU. A command's -h lists its flags;
-opts PRECISION.DTYPE=bfloat16 says which half type -amp means. The accuracy in each precision comes from parity.py.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from engine.settings import load_settings
from scripts.benchmarks.common import (
    MODES,
    ROOT,
    Measured,
    StepWorker,
    Turns,
    compare,
    fast_modes,
    machine,
    speed_table,
    spread,
    table,
    take_turns,
)
from scripts.command_line import Parser, at_least
from utils.distributed import find_devices

NO_DROPOUT = ["MODEL.DROPOUT=0", "MODEL.ATTENTION_DROPOUT=0", "MODEL.DROPPATH=0"]  # as timm's models come
AT_ONCE = 4  # processes: while one waits it keeps its weights and its context on the device


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for measure in (modes, seconds, linear, peer, start, save):
        command = commands.add_parser(measure.__name__, help=measure.__doc__, description=measure.__doc__)
        command.set_defaults(measure=measure)
        command.add_argument("-cfg", metavar="FILE", help="[ViT-Base on a GPU, ViT-Tiny on a CPU]")
        command.add_argument("-batch_size", type=at_least(1), metavar="N", help="[128 on a GPU, 32 on a CPU]")
        command.add_argument("-opts", nargs="+", default=[], metavar="KEY=VALUE", help="further settings")
        rounds = 7 if measure in (modes, peer, seconds) else 5
        command.add_argument("-rounds", type=at_least(1), default=rounds, metavar="N", help=f"turns [{rounds}]")
        if measure in (modes, peer):
            command.add_argument("-steps", type=at_least(1), default=5, metavar="N", help="of a turn, at least [5]")
            command.add_argument("-seconds", type=float, default=2.0, metavar="S", help="a turn's length, at least [2]")
        if measure is modes:
            command.add_argument("-modes", nargs="+", choices=MODES, metavar="MODE", help=" ".join(MODES))
            command.add_argument("-compile", action="store_true", help="measure each mode compiled, too")
        elif measure is seconds:
            command.add_argument("-iterations", type=at_least(1), default=100, metavar="N", help="of a turn [100]")
        elif measure is linear:
            command.add_argument("-scale", type=float, metavar="X", help="of width 4096, batch 512 [GPU: 1, CPU: 0.25]")
            command.add_argument("-epochs", type=at_least(1), metavar="N", help="of 50 batches [GPU: 25, CPU: 5]")
        elif measure is save:
            command.add_argument("-every", type=at_least(1), default=100, metavar="N", help="updates between two [100]")
            command.add_argument("-steps", type=at_least(1), default=400, metavar="N", help="of the epoch [400]")
    arguments = parser.parse_args(argv)
    options = ["-opts", *arguments.opts] if arguments.opts else []
    # Without a CUDA context, which would take memory from what is measured.
    arguments.kind, _ = find_devices(load_settings(["-cfg", "vit_tiny_patch16_224", *options]).config.DEVICE)
    size, batch_size = ("tiny", 32) if arguments.kind == "cpu" else ("base", 128)
    arguments.cfg = arguments.cfg or f"vit_{size}_patch16_224"
    arguments.batch_size = arguments.batch_size or batch_size
    print(arguments.measure(arguments))
    return 0


def worker(arguments: argparse.Namespace, *options: str, role: str = "step") -> StepWorker:
    """A worker on synthetic data; `options` win over the user's."""
    flags = ["-cfg", arguments.cfg, "-dataset", "synthetic", "-batch_size", arguments.batch_size]
    size = f"DATA.SYNTHETIC_SIZE={20 * arguments.batch_size}"
    return StepWorker([*flags, "-opts", size, *arguments.opts, *options], role)


def heading(arguments: argparse.Namespace, what: object) -> str:
    words = [Path(arguments.cfg).stem, f"batch {arguments.batch_size}", "synthetic data", *arguments.opts, str(what)]
    return f"{', '.join(words)}. {machine(arguments.kind)}"


def modes(arguments: argparse.Namespace) -> str:
    """Memory, iterations/s, images/s and utilisation in every precision; on CPUs in the fast ones."""
    names = arguments.modes or fast_modes(arguments.kind)
    reasons = {name: f"only on {MODES[name].kinds[0]}" for name in names if arguments.kind not in MODES[name].kinds}
    cases = {name: (name, False) for name in names if name not in reasons}
    if arguments.compile:
        cases |= {f"{name} compiled": (name, True) for name, _ in cases.values()}
    first, *others = cases or [None]
    turns = Turns(arguments.rounds, arguments.steps, arguments.seconds)
    measured: dict[str, Measured] = {}
    for begin in range(0, max(len(others), 1), AT_ONCE - 1):
        group = [first, *others[begin : begin + AT_ONCE - 1]] if cases else []
        # The first is measured beside all others, so that they can be held against it.
        workers = {
            case: worker(arguments, *MODES[cases[case][0]].options, f"COMPILE={cases[case][1]}") for case in group
        }
        products = {case: MODES[case].product for case in group if case in MODES}
        figures, more = take_turns(workers, turns, products)
        measured, reasons = figures | measured, reasons | more
    products = {case: MODES[name].product for case, (name, _) in cases.items()}
    return speed_table(heading(arguments, turns), products, measured, reasons)


def peer(arguments: argparse.Namespace) -> str:
    """timm's model in timm's own step against ours, both in bfloat16 without dropout."""
    options = ["AMP=true", "PRECISION.DTYPE=bfloat16", *NO_DROPOUT]
    workers = {"timm": worker(arguments, *options, role="timm"), "halfstep": worker(arguments, *options)}
    turns = Turns(arguments.rounds, arguments.steps, arguments.seconds)
    measured = compare(workers, turns)
    return speed_table(heading(arguments, turns), dict.fromkeys(workers, "bfloat16"), measured, {})


def seconds(arguments: argparse.Namespace) -> str:
    """Seconds per 100 iterations, without and with -amp in turn, their average and the speed-up."""
    workers = {"off": worker(arguments, "AMP=false"), "on": worker(arguments, "AMP=true")}
    measured = compare(workers, Turns(arguments.rounds, arguments.iterations))
    averages = {name: 100 * statistics.mean(each.seconds) for name, each in measured.items()}
    rows = []
    for name, each in measured.items():
        turns = " ".join(f"{100 * seconds:.2f}" for seconds in each.seconds)
        rows.append([name, turns, f"{averages[name]:.2f}", f"{averages['off'] / averages[name]:.3f}"])
    scaled = f", scaled up from {arguments.iterations}" if arguments.iterations != 100 else ""
    title = heading(arguments, f"seconds per 100 iterations{scaled}")
    return table(title, ["AMP", "seconds per 100 iterations", "average", "speed-up"], rows)


# Batches per update. Accumulation divides the loss by them, which the tutorial does not.
LINEAR = {"fp32": ("AMP=false", 1), "AMP": ("AMP=true", 1), "AMP, accumulation over 10": ("AMP=true", 10)}


def linear(arguments: argparse.Namespace) -> str:
    """Three Linear layers in fp32, with AMP, and with AMP and accumulation over 10 batches: seconds and last losses."""
    is_slow = arguments.kind == "cpu"
    scale = arguments.scale or (0.25 if is_slow else 1.0)
    epochs = arguments.epochs or (5 if is_slow else 25)  # the tutorial's 5 take a fast GPU 0.2 s
    width, batch = (max(8, round(size * scale / 8) * 8) for size in (4096, 512))  # multiples of 8, for Tensor Cores
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in LINEAR}
    for round_number in range(-1, arguments.rounds):  # the first is to warm up
        for name, (option, accumulate) in LINEAR.items():
            config = load_settings(["-cfg", arguments.cfg, "-opts", *arguments.opts, option]).config
            steps = 50 * epochs if round_number >= 0 else 10
            result = train_linear(config, arguments.kind, (width, batch), steps, accumulate)
            results[name] += [result] if round_number >= 0 else []
    medians = {name: statistics.median(seconds for seconds, _ in each) for name, each in results.items()}
    rows = []
    for name, each in results.items():
        row = [name, spread([seconds for seconds, _ in each], 3)]
        rows.append([*row, f"{medians['fp32'] / medians[name]:.2f}", f"{each[-1][1]:.4f}"])
    title = f"three Linear layers of {width}, batch {batch}, 50 batches, {epochs} epochs. {machine()}"
    return table(title, ["case", "seconds, median (least to most)", "speed-up", "last loss"], rows)


def train_linear(config, kind: str, sizes: tuple[int, int], steps: int, accumulate: int) -> tuple[float, float]:
    """Seconds of the whole training and the loss of the last batch; the same weights and data for every case."""
    import torch
    from torch import nn

    from engine.precision.policy import Precision, set_matmul

    width, batch = sizes
    device = torch.device(kind)
    precision = Precision(config, device)
    set_matmul(config.PRECISION.MATMUL)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    net.to(device)
    batches = [torch.randn(2, batch, width).to(device) for _ in range(10)]  # used in turn
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, fused=True)  # else the scaler waits for the device
    torch.ones((), device=device).item()  # waits for the device
    begin = time.perf_counter()
    for step in range(steps):
        images, targets = batches[step % len(batches)]
        with precision.autocast():
            output = net(images)
        loss = nn.functional.mse_loss(output.float(), targets)
        precision.scaler.scale(loss / accumulate).backward()
        if (step + 1) % accumulate == 0:  # 10 divides the number of batches: there is no rest
            precision.scaler.step(optimizer)
            precision.scaler.update()
            optimizer.zero_grad(set_to_none=True)
    last_loss = loss.item()  # waits for the device
    return time.perf_counter() - begin, last_loss


def start(arguments: argparse.Namespace) -> str:
    """Seconds from the command to the first step on digits, against those of importing the libraries."""
    libraries = "import torch, torchvision, timm"
    imports, starts = [], []
    with tempfile.TemporaryDirectory() as output:
        for _ in range(arguments.rounds):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", libraries], check=True)
            imports.append(time.perf_counter() - begin)
            starts.append(seconds_to_first_step(output))
    ratios = [ours / theirs for ours, theirs in zip(starts, imports, strict=True)]
    rows = [[f"python -c '{libraries}'", spread(imports, 2), "1"]]
    rows += [["from the command to the first step on digits", spread(starts, 2), spread(ratios, 2)]]
    return table(machine(), ["", "seconds, median (spread)", "ratio"], rows)


def seconds_to_first_step(output: str) -> float:
    """Seconds to the line of the first step, less the time of that step."""
    command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", ROOT / "configs/vit_digits.yaml"]
    command += ["-amp", "-output", output, "-epochs", "1", "-opts", "REPORT_FREQ=1"]
    begin = time.perf_counter()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        times = [time.perf_counter() - begin for line in process.stdout if "Step[" in line]
    # The second step is the measure of a step: the first also makes the optimizer's state, which is starting up.
    return times[0] - (times[1] - times[0])


def save(arguments: argparse.Namespace) -> str:
    """What checkpoints cost: the time in which training was blocked, and all that they made an epoch longer."""
    without, with_saves, blocked = [], [], []
    for _ in range(arguments.rounds):
        without.append(seconds_of_epoch(arguments)[0])
        whole, waiting = seconds_of_epoch(arguments, f"SAVE_STEPS={arguments.every}")
        with_saves.append(whole)
        blocked.append(100 * waiting / whole)
    longer = [100 * (after / before - 1) for before, after in zip(without, with_saves, strict=True)]
    rows = [["after the epoch only", spread(without), "-", "-"]]
    rows += [[f"every {arguments.every} updates", spread(with_saves), spread(longer, 2), spread(blocked, 3)]]
    columns = ["a checkpoint", "seconds, median (spread)", "longer by, %", "blocked, %"]
    return table(heading(arguments, f"{arguments.steps} updates"), columns, rows)


def seconds_of_epoch(arguments: argparse.Namespace, *options: str) -> tuple[float, float]:
    """Seconds of training in a run of one epoch, and of these for saving, the save after the epoch included."""
    num_images = arguments.steps * arguments.batch_size
    options = [f"DATA.SYNTHETIC_SIZE={num_images}", "TRAIN.ACCUM_ITER=1", *options, *arguments.opts]
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", arguments.cfg, "-dataset", "synthetic"]
        command += ["-batch_size", arguments.batch_size, "-epochs", 1, "-output", output, "-opts", *options]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        (log,) = Path(output).glob("*/log.txt")
        text = log.read_text()
    words = r"Train Acc: .*time: (\S+)", r"blocked training for (\S+)"
    return tuple(float(re.search(each, text)[1]) for each in words)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
