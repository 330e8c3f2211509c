"""Times processes that take turns (A B A B), so that a slow phase of the machine affects all of them. Prints tables."""

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from utils.errors import ConfigError
from utils.text import counted, markdown_table

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@dataclass(frozen=True)
class Mode:
    """A precision that can be measured."""

    options: tuple[str, ...]  # settings for -opts
    product: str  # number type of the matrix products that limit its speed
    kinds: tuple[str, ...] = ("cuda", "xpu", "mps", "cpu")  # kinds of devices that support it


AUTOCAST = ("AMP=true", "PRECISION.MODE=autocast")
# float8 is compared with the peak of bfloat16, in which it computes everything except the large linear layers.
MODES = {
    "fp32": Mode(("AMP=false", "PRECISION.MATMUL=ieee"), "float32"),
    "tf32": Mode(("AMP=false", "PRECISION.MATMUL=tf32"), "tf32", kinds=("cuda",)),
    "fp16": Mode((*AUTOCAST, "PRECISION.DTYPE=float16", "PRECISION.RESIDUAL=float32"), "float16"),
    "bf16": Mode((*AUTOCAST, "PRECISION.DTYPE=bfloat16", "PRECISION.RESIDUAL=float32"), "bfloat16"),
    "bf16-residual": Mode((*AUTOCAST, "PRECISION.DTYPE=bfloat16", "PRECISION.RESIDUAL=half"), "bfloat16"),
    "naive-fp16": Mode(("AMP=true", "PRECISION.DTYPE=float16", "PRECISION.MODE=naive"), "float16"),
    "naive-bf16": Mode(("AMP=true", "PRECISION.DTYPE=bfloat16", "PRECISION.MODE=naive"), "bfloat16"),
    "float8": Mode(("AMP=true", "PRECISION.DTYPE=bfloat16", "PRECISION.MODE=float8"), "bfloat16", kinds=("cuda",)),
}
# Other features of an update, each measured in bfloat16. The teacher of the distillation has random weights.
FEATURES = {name: f"TRAIN.OPTIMIZER.NAME={name}" for name in ("lamb", "lion", "laprop")} | {
    **{"EMA": "TRAIN.MODEL_EMA=true", "LoRA": "MODEL.LORA.RANK=8", "sizes": "TRAIN.SIZE_SCHEDULE=[0:128,1:224]"},
    "distillation": "TRAIN.DISTILLATION_TYPE=hard TRAIN.TEACHER_MODEL=deit_base_patch16_224",
}
CASES = MODES | {name: Mode((*MODES["bf16"].options, *each.split()), "bfloat16") for name, each in FEATURES.items()}
SLOW_ON_CPUS = ("fp16", "naive-fp16")  # one update takes minutes, at about 1/200 of float32's speed


def fast_modes(kind: str) -> list[str]:
    """Return the modes to measure on this kind of device by default."""
    return [name for name, mode in MODES.items() if kind in mode.kinds and (kind != "cpu" or name not in SLOW_ON_CPUS)]


class Refused(Exception):
    """An error for a case that cannot be measured on this machine. The message is the reason."""


class StepWorker:
    """A separate process (worker.py) that trains on request, so that each case has its own memory peak."""

    def __init__(self, arguments: Iterable, role: str = "step"):
        """Prepare the command. `role` is a key of ROLES in worker.py: step, plain (without our kernels), timm or loader."""
        self._command = [sys.executable, ROOT / "scripts/benchmarks/worker.py", role, *arguments]
        self._process: subprocess.Popen | None = None
        self._facts: dict | None = None
        self._warm = False

    def start(self) -> None:
        """Start the process without waiting for its setup. Without this call, the first request starts it."""
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(list(map(str, self._command)), **pipes)

    def facts(self) -> dict:
        """Wait until the worker is set up. Return its facts: {"images": number of images per update}."""
        self.start()
        if self._facts is None:
            self._facts = self._read()
        return self._facts

    def iterate(self, steps: int) -> float:
        """Return the seconds per iteration (one update), after one warm-up iteration (three in the first call)."""
        warm_up, self._warm = (1 if self._warm else 3), True
        return self._ask(steps=steps, warm_up=warm_up)["seconds"] / steps

    def peak_memory(self) -> int:
        """Return the peak memory use so far, in bytes."""
        return self._ask(memory=True)["bytes"]

    def peak(self, product: str) -> tuple[float, int]:
        """Return the FLOP/s of square matrix products in this type, and the FLOPs of a forward pass for one image."""
        return tuple(self._ask(peak=product)["flops"])

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._process, self._facts, self._warm = None, None, False  # so that start() works again

    def _ask(self, **question) -> dict:
        self.facts()
        with contextlib.suppress(BrokenPipeError):  # the process has ended; _read() reports its exit code
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise Refused(f"its process ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer


@dataclass
class Measured:
    """The figures of one case. The lists have one value per turn."""

    images: int  # number of images per update
    seconds: list[float] = field(default_factory=list)  # seconds per iteration
    base: list[float] = field(default_factory=list)  # seconds per iteration of the first case in the same rounds
    memory: int = 0  # peak memory in bytes
    peak: float = 0.0  # FLOP/s of matrix products; 0 if they were not timed
    forward_flops: int = 0  # FLOPs of the forward pass of one image; 0 if not counted

    @property
    def images_per_second(self) -> list[float]:
        return [self.images / each for each in self.seconds]

    @property
    def ratios(self) -> list[float]:
        """Return the speed-up over the first case, for each round in which both were measured."""
        return [base / own for base, own in zip(self.base, self.seconds, strict=False)]


@dataclass(frozen=True)
class Turns:
    """The number of turns of each case, and the length of a turn."""

    rounds: int
    steps: int  # minimum number of iterations per turn
    min_seconds: float = 0.0  # minimum length of a turn; five steps on a GPU take 0.1 s, too short to time well

    def __str__(self) -> str:
        seconds = f" and {self.min_seconds:g} s" if self.min_seconds else ""
        return f"{counted(self.rounds, 'turn')} of at least {counted(self.steps, 'iteration')}{seconds}"

    def steps_of(self, worker: StepWorker) -> int:
        return max(self.steps, math.ceil(self.min_seconds / worker.iterate(2))) if self.min_seconds else self.steps


def take_turns(
    workers: dict[str, StepWorker], turns: Turns, products: dict[str, str] | None = None
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measure all cases. Return {case: its figures} and {case that cannot be measured: the reason}.

    `products`: {case: type of the matrix products to time}. These products are timed after the peak memory use is read.
    """
    rounds = Rounds(workers, turns, products or {})
    for worker in workers.values():
        worker.start()
    rounds.attempt(rounds.set_up)
    for _ in range(turns.rounds):
        rounds.attempt(rounds.take_turn)
    rounds.attempt(rounds.finish)
    for worker in workers.values():
        worker.close()
    return rounds.measured, rounds.reasons


class Rounds:
    """The measurements of several cases that take turns. A case that is refused takes no further turn."""

    def __init__(self, workers: dict[str, StepWorker], turns: Turns, products: dict[str, str]):
        self.workers, self.turns, self.products = workers, turns, products
        self.first = next(iter(workers), None)  # the case that all others are compared with
        self.measured: dict[str, Measured] = {}
        self.reasons: dict[str, str] = {}  # why a case has no figures
        self.steps: dict[str, int] = {}

    def attempt(self, do: Callable[[str], None]) -> None:
        for name in self.workers:
            try:
                if name not in self.reasons:
                    do(name)
            except Refused as error:
                self.measured.pop(name, None)
                self.reasons[name] = str(error)

    def set_up(self, name: str) -> None:
        images = self.workers[name].facts()["images"]
        self.steps[name] = self.turns.steps_of(self.workers[name])
        self.measured[name] = Measured(images)

    def take_turn(self, name: str) -> None:
        each = self.measured[name]
        each.seconds.append(self.workers[name].iterate(self.steps[name]))
        print(f"{name}: {each.images_per_second[-1]:.1f} images/s", file=sys.stderr, flush=True)
        if self.first in self.measured:
            each.base.append(self.measured[self.first].seconds[-1])

    def finish(self, name: str) -> None:
        each, worker = self.measured[name], self.workers[name]
        each.memory = worker.peak_memory()
        if product := self.products.get(name):
            each.peak, each.forward_flops = worker.peak(product)


def compare(workers: dict[str, StepWorker], turns: Turns) -> dict[str, Measured]:
    """Measure all cases and return their figures. Raise ConfigError if a case cannot be measured."""
    measured, reasons = take_turns(workers, turns)
    if reasons:
        raise ConfigError("\n".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return measured


def machine(kind: str | None = None) -> str:
    """Return a description of this machine. `kind`: the kind of the measured device; None: the GPU if there is one."""
    import torch

    from utils.host import name_of

    cpuinfo = Path("/proc/cpuinfo")
    has_bf16 = cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text()
    name = name_of(torch.device("cpu")) + " with avx512_bf16" * has_bf16
    devices = [f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} used"]
    versions = f"torch {torch.__version__}, timm {version('timm')}, Python {platform.python_version()}"
    if torch.cuda.is_available() and kind in (None, "cuda"):
        devices.insert(0, torch.cuda.get_device_name())
        versions = f"CUDA {torch.version.cuda}, {versions}"
    return f"{'; '.join(devices)}; {versions}; {time.strftime('%Y-%m-%d')}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the median with the smallest and the largest value, as text."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a title with a Markdown table for BENCHMARKS.md."""
    return f"{title}\n\n{markdown_table(columns, rows)}\n"


class SpeedTable:
    """Prints the speed, memory and FLOPs utilisation of each case as soon as the case is measured.

    `products`: {case: type of its matrix products, which decides the peak FLOPs per second}. All cases are compared with the first.
    """

    def __init__(self, title: str, products: dict[str, str]):
        self.products, self.base, self.flops = products, next(iter(products), "-"), 0.0
        self.peaks: dict[str, float] = {}
        self.printed: set[str] = set()
        columns = ["case", "memory, GiB", f"memory against {self.base}", "iterations/s", "images/s"]
        self.columns = [*columns, f"against {self.base}", "FLOPs utilisation, %"]
        print(table(title, self.columns, []).rstrip(), flush=True)

    def measure(self, workers: dict[str, StepWorker], turns: Turns) -> None:
        self.add(*take_turns(workers, turns, self.products))

    def add(self, measured: dict[str, Measured], reasons: dict[str, str]) -> None:
        """Print the rows of cases that have no row yet."""
        self.flops = max([self.flops, *(3 * each.forward_flops for each in measured.values())])  # per training image
        self.peaks |= {self.products[name]: each.peak for name, each in measured.items() if each.peak}
        rows = [[name, reason, *["-"] * (len(self.columns) - 2)] for name, reason in reasons.items()]
        for name, each in measured.items():
            memory = f"{each.memory / measured[self.base].memory:.2f}" if self.base in measured else "-"
            row = [name, f"{each.memory / GIB:.2f}", memory, f"{1 / statistics.median(each.seconds):.4g}"]
            row += [spread(each.images_per_second), spread(each.ratios, 2) if each.ratios else "-"]
            peak = self.peaks.get(self.products[name], math.inf)
            share = 100 * self.flops * statistics.median(each.images_per_second) / peak
            rows.append([*row, f"{share:.3g}" if share else "-"])
        for row in rows:
            if row[0] not in self.printed:
                print(f"| {' | '.join(row)} |", flush=True)
        self.printed |= {row[0] for row in rows}

    @property
    def ending(self) -> str:
        speeds = ", ".join(f"{product} {peak / 1e9:.4g}" for product, peak in self.peaks.items())
        text = f"a training image takes {self.flops / 1e9:.4g} GFLOP (3 x forward)"
        return f"\nUtilisation: {text}; matrix products reach, in GFLOP/s: {speeds}.\n" if speeds else ""
