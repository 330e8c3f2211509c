"""The parts of a session in their order, each with its limit of time and the function that measures it."""

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.parts.common import ROOT
from scripts.benchmarks.session.journal import Journal


@dataclass(frozen=True)
class Part:
    """A part of the session."""

    name: str
    seconds: float  # the limit: more than it should take on an H200 with 16 cores
    title: str
    function: str  # module:function, called with a Context

    def command(self, folder: Path, dry: bool) -> list[str]:
        return part_command(self.name, folder, dry)


PARTS = (
    Part("machine", 40, "The machine", "machine:describe"),
    Part("probes", 90, "Probes: is it right", "probes.checks:run_all"),
    Part("small", 130, "ViT-S/16", "speed:measure_small"),
    Part("large", 150, "ViT-B/16 and ViT-L/16, against timm", "speed:measure_large"),
    Part("tests", 180, "tests/gpu", "gpu_tests:run_tests"),
    Part("loader", 90, "The loader alone", "loading:measure_loader"),
    Part("whole_run", 90, "A whole run from JPEGs", "whole_runs:time_run"),
    Part("recovery", 60, "Batch size auto, saves, SIGTERM and resume", "whole_runs:check_recovery"),
    Part("float8", 60, "ViT-B/16 in float8", "speed:measure_float8"),
)
# Files of probes. They run at once, each in a process of its own; the last, which measures times, after the others.
GROUPS = ("probes.kernels", "probes.compilation", "probes.augmentation", "probes.parallel", "probes.times")


@dataclass(frozen=True)
class Context:
    """What a part needs to know."""

    journal: Journal
    folder: Path
    dry: bool

    def pick(self, real, tiny):
        """What is measured on a GPU, or what a dry run takes in its place."""
        return tiny if self.dry else real

    @property
    def device(self) -> str:
        return self.pick("cuda", "cpu")

    @property
    def scratch(self) -> Path:
        """For files that are no results."""
        path = self.folder / "scratch"
        path.mkdir(exist_ok=True)
        return path


def part_command(name: str, folder: Path, dry: bool) -> list[str]:
    """Measures one part, or one group of probes."""
    script = str(ROOT / "scripts/benchmarks/session/run_part.py")
    return [sys.executable, script, name, str(folder), *(["-dry"] if dry else [])]
