"""Processes that train in turn (A B A B), so that what slows the machine slows all of them."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from scripts.benchmarks.parts.common import Refused, StepWorker
from scripts.command_line import at_least
from utils.text import counted


@dataclass
class Measured:
    """What the turns of one mode gave."""

    hello: dict
    seconds: list[float] = field(default_factory=list)  # per iteration, one for each turn
    base: list[float] = field(default_factory=list)  # those of the first mode in the same rounds
    memory: int = 0  # bytes
    tensors: int = 0  # bytes of tensors alone, where asked for
    peak: float = 0.0  # FLOP/s of matrix multiplications, and
    forward_flops: int = 0  # of one image: where asked for

    @property
    def images_per_second(self) -> list[float]:
        return [self.hello["images"] / each for each in self.seconds]

    @property
    def ratios(self) -> list[float]:
        """How many times faster than the first mode, in each round that both took part in."""
        return [base / own for base, own in zip(self.base, self.seconds, strict=False)]


@dataclass(frozen=True)
class Turns:
    """How many turns, how long, and of how many processes at a time."""

    rounds: int
    steps: int  # of a turn, at least
    min_seconds: float = 0.0  # of a turn: a GPU does five steps in a tenth of a second, too little to be timed well
    at_once: int | None = None  # processes; while one waits it keeps its weights and its context on the device

    def __str__(self) -> str:
        seconds = f" and {self.min_seconds:g} s" if self.min_seconds else ""
        return f"{counted(self.rounds, 'turn')} of at least {counted(self.steps, 'iteration')}{seconds}"

    def steps_of(self, worker: StepWorker) -> int:
        return max(self.steps, math.ceil(self.min_seconds / worker.iterate(2))) if self.min_seconds else self.steps

    def groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        """The first is in every group, so that the others can be held against it."""
        names = list(names)
        size = max((self.at_once or len(names)) - 1, 1)
        for start in range(1, max(len(names), 2) if names else 0, size):
            yield [*names[:1], *names[start : start + size]]


def add_turn_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-steps", type=at_least(1), default=5, metavar="N", help="updates of a turn, at least [5]")
    parser.add_argument("-seconds", type=float, default=2.0, metavar="S", help="a turn's length, at least [2]")


def take_turns(
    workers: dict[str, StepWorker], turns: Turns, peaks: dict[str, str] | None = None, tensors: bool = False
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Every worker in turn. What they gave by name, and why where one gave nothing.

    `peaks` names the matrix multiplications to be timed by some of them, once their memory was read.
    """
    comparison = Comparison(workers, turns, peaks or {}, tensors)
    for group in turns.groups(workers):
        comparison.compare(group)
    return comparison.measured, comparison.reasons


class Comparison:
    """The state of take_turns."""

    def __init__(self, workers: dict[str, StepWorker], turns: Turns, peaks: dict[str, str], tensors: bool):
        self.workers, self.turns, self.peaks, self.tensors = workers, turns, peaks, tensors
        self.first = next(iter(workers), None)
        self.steps: dict[str, int] = {}  # of a turn
        self.measured: dict[str, Measured] = {}
        self.reasons: dict[str, str] = {}

    def compare(self, group: list[str]) -> None:
        for name in group:
            self.workers[name].start()
        self.attempt(self.set_up, [name for name in group if name not in self.measured])
        for _ in range(self.turns.rounds):
            self.attempt(self.take_turn, group)
        done = group[1:] if group[-1] != list(self.workers)[-1] else group  # the first goes on
        self.attempt(self.finish, done)
        for name in done:
            self.workers[name].close()

    def attempt(self, do: Callable[[str], None], names: Iterable[str]) -> None:
        for name in names:
            try:
                if name not in self.reasons:
                    do(name)
            except Refused as error:
                self.measured.pop(name, None)
                self.reasons[name] = str(error)

    def set_up(self, name: str) -> None:
        hello = self.workers[name].hello()
        self.steps[name] = self.turns.steps_of(self.workers[name])
        self.measured[name] = Measured(hello)

    def take_turn(self, name: str) -> None:
        each = self.measured[name]
        each.seconds.append(self.workers[name].iterate(self.steps[name]))
        if self.first in self.measured:
            each.base.append(self.measured[self.first].seconds[-1])

    def finish(self, name: str) -> None:
        each, worker = self.measured[name], self.workers[name]
        each.memory, each.tensors = worker.peak_memory(), worker.tensor_memory() if self.tensors else 0
        if name in self.peaks:
            each.peak, each.forward_flops = worker.matmul_peak(self.peaks[name]), worker.forward_flops()
