"""Measures halfstep on this machine and prints Markdown tables: what BENCHMARKS.md holds.

python scripts/benchmark.py amp      one model's step in float32 and with -amp, in turn: images/s, ratio, memory
python scripts/benchmark.py peer     the same model in the plain loop of timm's train.py and here, both in bfloat16
python scripts/benchmark.py start    from the command to the first training step, against importing the libraries
python scripts/benchmark.py digits   accuracy on the digits in float32 and with -amp, over several seeds
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # our folders are found from wherever this is started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("amp", "peer"):
        steps = commands.add_parser(name)
        steps.add_argument("-cfg", default=str(ROOT / "configs/vit_tiny_patch16_224.yaml"))
        steps.add_argument("-batch_size", type=int, default=32)
        steps.add_argument("-rounds", type=int, default=7)
        steps.add_argument("-opts", nargs="*", default=[], help="further settings, KEY=VALUE")
        steps.add_argument("-steps", type=int, default=5, help="updates timed in each round of each of the two")
    start = commands.add_parser("start")
    start.add_argument("-rounds", type=int, default=5)
    digits = commands.add_parser("digits")
    digits.add_argument("-seeds", type=int, default=5)
    arguments = parser.parse_args()
    print(machine(), flush=True)
    {"amp": compare_amp, "peer": compare_peer, "start": time_start, "digits": compare_digits}[arguments.command](
        arguments
    )


def machine() -> str:
    """What the figures were measured on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{processor}, {os.cpu_count()} cores"
    return f"{device}; torch {torch.__version__}, Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}\n"


def spread(values: list[float], digits: int = 1) -> str:
    """Median, and the least and most of all rounds."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def compare_amp(arguments: argparse.Namespace) -> None:
    """A process for each precision, so that each has its own memory peak; they take turns."""
    modes = {"float32": [], "-amp": ["-amp"]}
    workers = {name: StepWorker(arguments, flags) for name, flags in modes.items()}
    rates = {name: [] for name in modes}
    for _ in range(arguments.rounds):
        for name, worker in workers.items():
            rates[name].append(worker.images_per_second(arguments.steps))
    memory = {name: worker.peak_memory() for name, worker in workers.items()}
    ratios = [half / full for half, full in zip(rates["-amp"], rates["float32"], strict=True)]
    print(
        f"{Path(arguments.cfg).stem}, batch {arguments.batch_size}, synthetic data, {arguments.rounds} rounds in turn\n"
    )
    print("| | images/s, median (spread) | against float32 | peak memory, MB | against float32 |")
    print("|---|---|---|---|---|")
    for name in modes:
        ratio = "1" if name == "float32" else spread(ratios, 2)
        share = memory[name] / memory["float32"]
        print(f"| {name} | {spread(rates[name])} | {ratio} | {memory[name]:.0f} | {share:.2f} |")


NO_DROPOUT = ["MODEL.DROPOUT=0", "MODEL.ATTENTION_DROPOUT=0", "MODEL.DROPPATH=0"]  # as timm's models come


def compare_peer(arguments: argparse.Namespace) -> None:
    """timm's model in timm's own step against ours, both in bfloat16, with attention as each chooses it."""
    arguments.opts = [*NO_DROPOUT, *arguments.opts]
    flags = ["-amp", "-amp_dtype", "bfloat16"]
    works = {"timm": work_peer, "halfstep": work_steps}
    workers = {name: StepWorker(arguments, flags, work) for name, work in works.items()}
    rates = {name: [] for name in workers}
    for _ in range(arguments.rounds):
        for name, worker in workers.items():
            rates[name].append(worker.images_per_second(arguments.steps))
    memory = {name: worker.peak_memory() for name, worker in workers.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates["halfstep"], rates["timm"], strict=True)]
    print(
        f"{Path(arguments.cfg).stem}, batch {arguments.batch_size}, bfloat16, no dropout, synthetic data, "
        f"{arguments.rounds} rounds in turn\n"
    )
    print("| | images/s, median (spread) | against timm | peak memory, MB | against timm |")
    print("|---|---|---|---|---|")
    for name in workers:
        ratio = "1" if name == "timm" else spread(ratios, 2)
        print(
            f"| {name} | {spread(rates[name])} | {ratio} | {memory[name]:.0f} | {memory[name] / memory['timm']:.2f} |"
        )


class StepWorker:
    """A process of its own that trains on synthetic data when asked; asked by a line, it answers with a line."""

    def __init__(self, arguments: argparse.Namespace, flags: list[str], work: Callable | None = None):
        work = (work or work_steps).__name__
        command = [sys.executable, __file__, "--worker", work, "-cfg", arguments.cfg, "-dataset", "synthetic"]
        command += ["-batch_size", str(arguments.batch_size), *flags]
        command += ["-opts", *arguments.opts] if arguments.opts else []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.images_per_second(2)  # warm-up

    def _ask(self, question: str) -> float:
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def images_per_second(self, steps: int) -> float:
        return self._ask(str(steps))

    def peak_memory(self) -> float:
        answer = self._ask("memory")
        self._process.stdin.close()
        self._process.wait()
        return answer


def work_steps(argv: list[str]) -> None:
    """The other side of StepWorker: answers on standard output."""
    import torch

    from configs.load import load
    from datasets import build_train_data, load_image_sets
    from engine.recorder import peak_memory
    from engine.trainer import Trainer
    from models import build_model
    from utils.distributed import Process
    from utils.log import Log
    from utils.signals import StopSignal

    config = load(argv).config
    process = Process.start(config.DEVICE, {})
    train_set, _ = load_image_sets(config)
    data = build_train_data(config, train_set, 0, 1, process.device)
    model = build_model(config, len(train_set.classes)).to(process.device)
    trainer = Trainer(config, model, data, process, Log(0), StopSignal())
    windows = data.windows(0, sys.maxsize)

    def train(steps: int) -> None:
        for _ in range(steps):
            trainer.update(next(windows))
        trainer.report()  # waits for the device

    answer_questions(train, data.global_batch, lambda: peak_memory(process.device))
    assert torch.isfinite(trainer.totals).all()


def work_peer(argv: list[str]) -> None:
    """The same model as people train it with timm's train.py: its plain loop, its optimizer, the loss read every step.

    Images lie ready on the device as float32, already normalised: loading and normalising are not in the time.
    """
    import timm
    import torch
    from timm.optim import create_optimizer_v2

    from configs.load import load
    from engine.recorder import peak_memory
    from utils.distributed import choose_device

    config = load(argv).config
    device, size = choose_device(config.DEVICE, local_rank=0), config.DATA.BATCH_SIZE
    model = timm.create_model(config.MODEL.NAME, num_classes=1000).to(device).train()
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=config.TRAIN.SMOOTHING)
    images = torch.randn(
        size, config.DATA.IMAGE_CHANNELS, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE, device=device
    )
    targets = torch.randint(1000, (size,), device=device)
    losses = []

    def train(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = criterion(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    answer_questions(train, size, lambda: peak_memory(device))
    assert torch.tensor(losses).isfinite().all()


def answer_questions(train: Callable[[int], None], batch: int, peak_memory: Callable[[], float]) -> None:
    """A line with a number of steps: images/s of that many. The line `memory`: peak memory in MB."""
    for question in sys.stdin:
        if question.strip() == "memory":
            print(peak_memory() / 2**20, flush=True)
            continue
        start = time.perf_counter()
        train(int(question))
        print(int(question) * batch / (time.perf_counter() - start), flush=True)


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


def compare_digits(arguments: argparse.Namespace) -> None:
    """Whole runs by the entry script, precisions in turn for every seed."""
    modes = {"float32": [], "-amp": ["-amp"]}
    found = {name: [] for name in modes}
    for seed in range(arguments.seeds):
        for name, flags in modes.items():
            with tempfile.TemporaryDirectory() as output:
                command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", ROOT / "configs/vit_digits.yaml"]
                command += ["-seed", seed, "-output", output, *flags]
                subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
                (metrics,) = Path(output).glob("*/metrics.jsonl")
                found[name].append(json.loads(metrics.read_text().splitlines()[-1])["eval_top1"])
            print(f"seed {seed}, {name}: {found[name][-1]:.2f}%", file=sys.stderr, flush=True)
    print("| | validation top-1 of each seed, % | mean | standard deviation |")
    print("|---|---|---|---|")
    for name, values in found.items():
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"| {name} | {each} | {statistics.mean(values):.2f} | {statistics.stdev(values):.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        {"work_steps": work_steps, "work_peer": work_peer}[sys.argv[2]](sys.argv[3:])
    else:
        main()
