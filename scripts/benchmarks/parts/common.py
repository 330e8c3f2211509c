"""What the benchmarks share: processes that train when asked, turns among them, and tables as Markdown and as a chart."""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30


@dataclass(frozen=True)
class Mode:
    """A precision that can be measured."""

    options: tuple[str, ...]  # for -opts
    peak: str  # whose matrix multiplications bound it
    kinds: tuple[str, ...] = ("cuda", "xpu", "mps", "cpu")  # of devices that have it


# float8 is held against bfloat16, in which it computes all but the large linear layers.
MODES = {
    "fp32": Mode(("AMP=false", "PRECISION.MATMUL=ieee"), "float32"),
    "tf32": Mode(("AMP=false", "PRECISION.MATMUL=tf32"), "tf32", kinds=("cuda",)),
    "fp16": Mode(("AMP=true", "PRECISION.DTYPE=float16", "PRECISION.MODE=autocast"), "float16"),
    "bf16": Mode(("AMP=true", "PRECISION.DTYPE=bfloat16", "PRECISION.MODE=autocast"), "bfloat16"),
    "bf16-residual": Mode(("AMP=true", "PRECISION.DTYPE=bfloat16", "PRECISION.RESIDUAL=half"), "bfloat16"),
    "naive-fp16": Mode(("AMP=true", "PRECISION.DTYPE=float16", "PRECISION.MODE=naive"), "float16"),
    "naive-bf16": Mode(("AMP=true", "PRECISION.DTYPE=bfloat16", "PRECISION.MODE=naive"), "bfloat16"),
    "float8": Mode(("AMP=true", "PRECISION.DTYPE=bfloat16", "PRECISION.MODE=float8"), "bfloat16", kinds=("cuda",)),
}
SLOW_ON_CPUS = ("fp16", "naive-fp16")  # about a two-hundredth of float32's speed: minutes for one update


class Refused(Exception):
    """A mode cannot be measured here; the message is the reason."""

    def __init__(self, reason: str, out_of_memory: bool = False):
        super().__init__(reason)
        self.out_of_memory = out_of_memory


class StepWorker:
    """A process of its own that trains when asked, so that each mode has its own memory peak (worker.py)."""

    def __init__(self, arguments: Iterable, memory_gb: float | None = None, peer: bool = False):
        """`peer`: the same model in timm's own step, in place of ours."""
        own = json.dumps({"memory_gb": memory_gb, "peer": peer})
        command = [sys.executable, ROOT / "scripts/benchmarks/parts/worker.py", own, *arguments]
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._hello: dict | None = None
        self._warm = False

    def hello(self) -> dict:
        """The machine, kind of device and images of an update; waits until it is set up."""
        if self._hello is None:
            self._hello = self._read()
        return self._hello

    def iterate(self, steps: int, warm_up: int | None = None) -> float:
        """Seconds per iteration (one update), after some that are not timed: one, or three the first time."""
        warm_up, self._warm = warm_up or (1 if self._warm else 3), True
        return self._ask(steps=steps, warm_up=warm_up)["seconds"] / steps

    def peak_memory(self) -> int:
        """Bytes so far."""
        return self._ask(memory=True)["bytes"]

    def tensor_memory(self) -> int:
        """Bytes that tensors fill at the peak of an update, libraries and what the allocator wastes left out."""
        return self._ask(tensors=True)["bytes"]

    def forward_flops(self) -> int:
        """Of the model, for one image."""
        return self._ask(flops=True)["flops"]

    def matmul_peak(self, kind: str) -> float:
        """FLOP/s of square matrix multiplications."""
        return self._ask(peak=kind)["flops"]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _ask(self, **question) -> dict:
        self.hello()
        with contextlib.suppress(BrokenPipeError):  # it ended: reading says how
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise Refused(f"its process ended with exit code {code}", out_of_memory=code == -9)  # the kernel's way
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"], answer["out_of_memory"])
        return answer


@dataclass
class Measured:
    """What the turns of one mode gave."""

    hello: dict
    seconds: list[float] = field(default_factory=list)  # per iteration, one for each turn
    memory: int = 0  # bytes
    tensors: int = 0  # bytes of tensors alone, where asked for
    peak: float = 0.0  # FLOP/s of matrix multiplications, and
    forward_flops: int = 0  # of one image: where asked for

    @property
    def images_per_second(self) -> list[float]:
        return [self.hello["images"] / each for each in self.seconds]


def take_turns(
    workers: dict[str, StepWorker], rounds: int, steps: int, peaks: dict[str, str] | None = None, tensors: bool = False
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Every worker in turn, `rounds` times. What they gave by name, and why where one gave nothing.

    `peaks` names the matrix multiplications to be timed by some of them, once their memory was read.
    """
    measured: dict[str, Measured] = {}
    reasons: dict[str, str] = {}

    def attempt(name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Refused as error:
            measured.pop(name, None)
            reasons[name] = str(error)

    for name, worker in workers.items():
        attempt(name, lambda: measured.update({name: Measured(worker.hello())}))  # noqa: B023
    for _ in range(rounds):
        for name in list(measured):
            attempt(name, lambda: measured[name].seconds.append(workers[name].iterate(steps)))  # noqa: B023
    for name, each in list(measured.items()):
        each.memory = workers[name].peak_memory()
        if tensors:
            each.tensors = workers[name].tensor_memory()
        if name in (peaks or {}):
            each.peak, each.forward_flops = workers[name].matmul_peak(peaks[name]), workers[name].forward_flops()
    for worker in workers.values():
        worker.close()
    return measured, reasons


def machine() -> str:
    """What the figures were measured on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} used"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor
    return f"{device}; torch {torch.__version__}, Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}"


def spread(values: list[float], digits: int = 1) -> str:
    """Median, and the least and most of all rounds."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


@dataclass
class Panel:
    """Bars of a chart: a name and a height for each."""

    title: str
    bars: dict[str, float]


@dataclass
class Table:
    """One result: Markdown for BENCHMARKS.md, and the panels of its chart."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [self.title, ""]
        lines += [f"| {' | '.join(row)} |" for row in (self.columns, ["---"] * len(self.columns), *self.rows)]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])]) + "\n"

    def draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")  # a server has no screen
        from matplotlib import pyplot

        size = (1 + 4.5 * len(self.panels), 1.8 + 0.4 * max(len(panel.bars) for panel in self.panels))
        figure, all_axes = pyplot.subplots(1, len(self.panels), figsize=size, layout="constrained", squeeze=False)
        for axes, panel in zip(all_axes[0], self.panels, strict=True):
            bars = axes.barh(list(panel.bars), list(panel.bars.values()))
            axes.bar_label(bars, fmt="%.4g", padding=3)
            axes.margins(x=0.15)
            axes.invert_yaxis()  # in the order of the table
            axes.set_title(panel.title, fontsize="medium")
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(self.title, fontsize="small", wrap=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
