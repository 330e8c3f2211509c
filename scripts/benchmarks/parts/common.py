"""What the benchmarks share: processes that train when asked, and tables as Markdown and as a chart."""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30


@dataclass(frozen=True)
class Mode:
    """A precision that can be measured."""

    options: tuple[str, ...]  # for -opts
    peak: str  # whose matrix multiplications bound it
    kinds: tuple[str, ...] = ("cuda", "xpu", "mps", "cpu")  # of devices that have it


AUTOCAST = ("AMP=true", "PRECISION.MODE=autocast")
# float8 is held against bfloat16, in which it computes all but the large linear layers.
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
SLOW_ON_CPUS = ("fp16", "naive-fp16")  # about a two-hundredth of float32's speed: minutes for one update


class Refused(Exception):
    """A mode cannot be measured here; the message is the reason."""

    def __init__(self, reason: str, out_of_memory: bool = False):
        super().__init__(reason)
        self.out_of_memory = out_of_memory


class StepWorker:
    """A process of its own that trains when asked, so that each mode has its own memory peak (worker.py)."""

    def __init__(self, arguments: Iterable, memory_gb: float | None = None, role: str = "step"):
        """`role`: step; timm, the same model in timm's own step; loader, only what reads the images."""
        own = json.dumps({"memory_gb": memory_gb, "role": role})
        self._command = [sys.executable, ROOT / "scripts/benchmarks/parts/worker.py", own, *arguments]
        self._process: subprocess.Popen | None = None
        self._hello: dict | None = None
        self._warm = False

    def start(self) -> None:
        """Begin to set it up, without waiting. The first question would start it too."""
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(list(map(str, self._command)), **pipes)

    def hello(self) -> dict:
        """The machine, device, kind of device and images of an update; waits until it is set up."""
        self.start()
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
        if self._process is None:
            return
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


def machine(kind: str | None = None) -> str:
    """What the figures were measured on. `kind` of device; if it is not given, the GPU is named where there is one."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name", platform.processor())
    name += " with avx512_bf16" if "avx512_bf16" in found.get("flags", "").split() else ""
    devices = [f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} used"]
    versions = f"torch {torch.__version__}, timm {version('timm')}, Python {platform.python_version()}"
    if torch.cuda.is_available() and kind in (None, "cuda"):
        devices.insert(0, torch.cuda.get_device_name())
        versions = f"CUDA {torch.version.cuda}, {versions}"
    return f"{'; '.join(devices)}; {versions}; {time.strftime('%Y-%m-%d')}"


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
