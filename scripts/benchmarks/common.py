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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from utils.errors import ConfigError
from utils.text import counted, markdown_table

ROOT = Path(__file__).resolve().parents[2]


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
        """Prepare the command. `role` is a key of ROLES in worker.py: step, timm or loader."""
        self._command = [sys.executable, ROOT / "scripts/benchmarks/worker.py", role, *arguments]
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process without waiting for its setup."""
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(list(map(str, self._command)), **pipes)

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker's object in worker.py. Return the result, or raise Refused with the reason."""
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and may have written the reason
            self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise Refused(f"its process ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer["result"]

    def close(self) -> None:
        """End the process. `start` can start another one."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._process = None


@dataclass
class Measured:
    """The figures of one case. The lists have one value per turn."""

    images: int  # number of images per update
    seconds: list[float] = field(default_factory=list)  # seconds per iteration (one update)
    ratios: list[float] = field(default_factory=list)  # speed-up over the first case; empty if that was refused
    memory: int = 0  # peak memory in bytes
    peak: float = 0.0  # FLOP/s of matrix products; 0 if they were not timed
    forward_flops: int = 0  # FLOPs of the forward pass of one image; 0 if not counted

    @property
    def images_per_second(self) -> list[float]:
        return [self.images / each for each in self.seconds]


@dataclass(frozen=True)
class Turns:
    """The number of turns of each case, and the length of a turn."""

    rounds: int
    steps: int  # minimum number of iterations per turn
    min_seconds: float = 0.0  # minimum length of a turn; five steps on a GPU take 0.1 s, too short to time well

    def __str__(self) -> str:
        seconds = f" and {self.min_seconds:g} s" if self.min_seconds else ""
        return f"{counted(self.rounds, 'turn')} of at least {counted(self.steps, 'iteration')}{seconds}"


def take_turns(
    workers: dict[str, StepWorker], turns: Turns, products: dict[str, str] | None = None
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measure all cases in turn. Return {case: its figures} and {case that cannot be measured: the reason}.

    `products`: {case: type of the matrix products to time}. These products are timed after the peak memory use is read.
    """
    measured: dict[str, Measured] = {}
    reasons: dict[str, str] = {}
    for worker in workers.values():
        worker.start()
    cases = {name: measure(name, worker, turns, (products or {}).get(name)) for name, worker in workers.items()}
    while cases:
        for name, case in list(cases.items()):
            try:
                measured[name] = next(case)
            except StopIteration:
                del cases[name]
            except Refused as error:
                del cases[name]
                measured.pop(name, None)
                reasons[name] = str(error)
    for worker in workers.values():
        worker.close()
    if (first := next(iter(workers), None)) in measured:
        for case_measured in measured.values():
            case_measured.ratios = [
                base / own for base, own in zip(measured[first].seconds, case_measured.seconds, strict=True)
            ]
    return measured, reasons


def measure(name: str, worker: StepWorker, turns: Turns, product: str | None) -> Iterator[Measured]:
    """Yield the figures of a case after its setup, after each turn, and at the end, so that cases can take turns."""
    measured = Measured(worker.ask("images_per_update"))
    seconds = worker.ask("time_updates", 3, 2) / 2
    steps = max(turns.steps, math.ceil(turns.min_seconds / seconds))
    yield measured
    for _ in range(turns.rounds):
        measured.seconds.append(worker.ask("time_updates", 1, steps) / steps)
        print(f"{name}: {measured.images_per_second[-1]:.1f} images/s", file=sys.stderr, flush=True)
        yield measured
    measured.memory = worker.ask("peak_memory")
    if product:
        measured.peak, measured.forward_flops = worker.ask("peak_and_flops", product)
    yield measured


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
    name = name_of(torch.device("cpu"))
    name += " with avx512_bf16" if has_bf16 else ""
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
