"""AMP auto: times this model's own updates in float32 and in half precision, and chooses the faster one."""

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import timm  # noqa: F401 (each run imports it, so its seconds are no part of the measurement)
import torch
from torch import nn

from configs.schema import Config
from datasets import Batch, Window
from engine.batch_size import STEP, StepTrial
from engine.memory import release, reports_memory, shortage
from engine.parallel import is_sharded
from engine.precision import Precision
from models import add_adapters, build_model
from utils.distributed import Process
from utils.host import synchronize
from utils.seed import unchanged_random_state
from utils.text import counted

SECONDS = 2.3  # with the construction of the models; half of it is left after the first update in any case
FASTER = 1.03  # half precision must be this many times as fast as float32
FIRST = 2  # images of the first micro-batches; BatchNorm refuses a batch of one image
SLOWEST, FASTEST = 2, 8  # smallest and largest factor between two sizes: from closer ones, no larger size follows
MOST_ROUNDS = 10  # after which the times are precise enough

TimeBoth = Callable[[int], tuple[float, float]]
Rounds = dict[int, list[tuple[float, float]]]  # {images of a micro-batch: seconds in float32 and half precision}


@dataclass(frozen=True)
class UpdateTimes:
    """The times of a model's updates in float32 and in half precision, in seconds."""

    half: str  # the half type, such as bfloat16
    in_float32: float
    in_half: float
    num_rounds: int  # timed updates in each precision
    sizes: tuple[int, ...]  # images of their micro-batches
    batch_size: int  # images of a micro-batch of the run
    is_compiled: bool  # whether the run compiles its model

    @classmethod
    def of(cls, half: str, rounds: Rounds, batch_size: int, is_compiled: bool) -> "UpdateTimes":
        """Return the times of updates of `batch_size` images, from the shortest times of the two largest sizes.

        Other programs disturbed the shortest times least.
        """
        if batch_size in rounds:
            rounds = {batch_size: rounds[batch_size]}
        sizes = tuple(sorted(rounds))[-2:]
        shortest = [{size: min(times[kind] for times in rounds[size]) for size in sizes} for kind in (0, 1)]
        in_float32, in_half = (extrapolate(seconds, batch_size) for seconds in shortest)
        return cls(half, in_float32, in_half, sum(len(rounds[size]) for size in sizes), sizes, batch_size, is_compiled)

    @property
    def speedup(self) -> float:
        return self.in_float32 / self.in_half

    @property
    def half_is_faster(self) -> bool:
        return self.speedup >= FASTER

    def describe(self) -> str:
        """Return the comparison in words."""
        conditions = [f"{counted(self.num_rounds, 'update')} each"]
        if self.sizes[-1] < self.batch_size:
            conditions.append(f"with {' and '.join(map(str, self.sizes))} of {counted(self.batch_size, 'image')}")
        if self.is_compiled:
            conditions.append("without torch.compile")
        names, factor = (self.half, "float32"), self.speedup
        if factor < 1:
            names, factor = ("float32", self.half), 1 / factor
        text = f"{names[0]} is {factor:.{2 if factor < 1.1 else 1}f} times as fast as {names[1]}"
        if 1 / FASTER < self.speedup < FASTER:
            text = f"{self.half} is no faster than float32"
        return f"{text} for this model ({', '.join(conditions)})"


def extrapolate(seconds: dict[int, float], batch_size: int) -> float:
    """Return the seconds of an update of `batch_size` images, from those of one or two sizes.

    A part of an update, such as the optimizer's step, takes as long with few images.
    """
    *smaller, largest = sorted(seconds)
    if not smaller:
        return seconds[largest]
    per_image = max(seconds[largest] - seconds[smaller[-1]], 0) / (largest - smaller[-1])
    return seconds[largest] + per_image * (batch_size - largest)


def choose_by_speed(config: Config, num_classes: int, process: Process, batch_size: int) -> tuple[bool, str]:
    """Return the value of AMP that makes updates faster in process 0, and why, in words. Collective."""
    times = time_precisions(config, num_classes, process, batch_size)

    def choose() -> tuple[bool, str]:
        if times is None:
            return True, f"half precision is used, as no update of {FIRST} images in float32 fits into memory beside it"
        return times.half_is_faster, f"{times.describe()}: {'used' if times.half_is_faster else 'float32 is used'}"

    is_used, how = process.first(choose)
    return is_used, how


def time_precisions(config: Config, num_classes: int, process: Process, batch_size: int) -> UpdateTimes | None:
    """Time updates in both precisions, or return None if not even a small one fits into memory.

    Each process computes alone, and all at the same time, as in training. With fsdp2 they compute one model together.
    """
    device = process.device
    with unchanged_random_state(device):
        rounds = _time_trials(config, num_classes, process, batch_size)
    release(device)  # the memory of the trials, before the run trains
    if reports_memory(device):
        getattr(torch, device.type).reset_peak_memory_stats(device)  # so that the run reports its own peak
    if not rounds:
        return None
    half = str(Precision(replace(config, AMP=True), device).half).removeprefix("torch.")
    return UpdateTimes.of(half, rounds, batch_size, bool(config.COMPILE))


def _time_trials(config: Config, num_classes: int, process: Process, batch_size: int) -> Rounds:
    trials = Trials(config, num_classes, process)
    return time_updates(trials.time_both, batch_size, trials.elapsed)


def time_updates(time_both: TimeBoth, batch_size: int, elapsed: Callable[[], float]) -> Rounds:
    """Time updates of as many images as there is time for, at most `batch_size`.

    `time_both(size)` makes an update in each precision, and raises MemoryError if the size does not fit. `elapsed()`
    returns the seconds since the start. The first update of a size is a warm-up, and counts only if there is no time
    for another. The very first one also loads libraries, which takes long on a busy machine: there, the limit is moved.
    """
    rounds: Rounds = {}
    size = min(FIRST, batch_size)
    try:
        warm_up = time_both(size)
    except MemoryError:
        return rounds
    limit = max(SECONDS, elapsed() + SECONDS / 2)

    # An update takes less time than its number of images suggests, so after that of a larger size there is mostly time
    # for a second one. That one may exceed the limit a little, because the first one prepares the kernels of its size.
    def again() -> tuple[float, float]:
        return time_both(size) if limit - elapsed() > sum(warm_up) / 4 else warm_up

    def next_size(seconds: float) -> int:
        return larger_size(size, batch_size, 0.8 * (limit - elapsed()) / seconds)

    larger = next_size(sum(warm_up) / 2)
    if not larger:
        rounds[size] = [again()]
        larger = next_size(sum(rounds[size][0]))
    while larger:
        try:
            warm_up = time_both(larger)
        except MemoryError:
            break
        size = larger
        rounds[size] = [again()]
        larger = next_size(sum(rounds[size][0]))
    if not rounds:
        rounds[size] = [again()]
    while len(rounds[size]) < MOST_ROUNDS and limit - elapsed() > sum(rounds[size][-1]):
        rounds[size].append(time_both(size))
    return rounds


def larger_size(size: int, batch_size: int, factor: float) -> int:
    """Return the next size to time, or 0 if there is none. `factor`: how much longer an update may take."""
    factor = min(factor, FASTEST)
    if batch_size <= size * factor:
        return batch_size if batch_size > size else 0
    # A multiple of 8, or even, because images may be mixed in pairs.
    unit = STEP if size * factor >= STEP else 2
    return int(size * factor) // unit * unit if factor >= SLOWEST else 0


class PrecisionTrial(StepTrial):
    """Updates in one precision with a throw-away trainer like the run's trainer, on random weights and images."""

    def __init__(self, config: Config, process: Process, model: nn.Module):
        super().__init__(config, config.MODEL.NUM_CLASSES, process)
        self.process, self.model = process, model

    def new_model(self, config: Config) -> nn.Module:
        return self.model if is_sharded(config, self.process) else self.model.to(self.device)  # FSDP moves its blocks

    def seconds(self, window: Window, clock: Callable[[], float]) -> float:
        """Return the seconds of an update."""
        synchronize(self.device)
        start = clock()
        self.trainer.update(window)
        synchronize(self.device)
        return clock() - start


class Trials:
    """A trial in float32 and one in half precision, which make the same updates in turn."""

    def __init__(self, config: Config, num_classes: int, process: Process):
        config = replace(config.changed("MODEL", NUM_CLASSES=num_classes), COMPILE=False)
        self.is_sharded = is_sharded(config, process) and process.rendezvous is not None  # not in a simulated process
        self.process = process if self.is_sharded else Process(process.device)
        # With one thread, its CPU time is measured: other programs do not count. With several, it includes waiting.
        has_one_thread = process.device.type == "cpu" and torch.get_num_threads() == 1 and not self.is_sharded
        self.clock = time.thread_time if has_one_thread else time.perf_counter
        self.start = self.clock()
        model = add_adapters(build_model(config, num_classes), config)
        models = {False: copy.deepcopy(model), True: model}
        self.trials = [PrecisionTrial(replace(config, AMP=amp), self.process, models[amp]) for amp in models]
        self.size = 0
        self.window, self.batches = Window(0, 0, 0, iter(())), list[Batch]()

    def agree(self, number: Callable[[], Any]) -> Any:
        """Return the number of process 0 if the processes compute one model together, else that of this process."""
        return self.process.first(number) if self.is_sharded else number()

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return self.agree(lambda: self.clock() - self.start)

    def time_both(self, size: int) -> tuple[float, float]:
        """Make an update in each precision, and return the seconds of both. Raise MemoryError if the size is too large.

        With fsdp2, the other processes would wait for the one without memory, so its error ends the run.
        """
        try:
            seconds = self._seconds(size)
            return self.agree(lambda: seconds[0]), self.agree(lambda: seconds[1])
        except RuntimeError as error:
            reason = shortage(error)
            if self.is_sharded or not reason:
                raise
        # This is outside `except`, because the error's traceback keeps tensors of the forward pass alive.
        for trial in self.trials:
            if trial.trainer:
                trial.trainer.replica.zero_grad(set_to_none=True)
        release(self.process.device)
        raise MemoryError(reason)

    def _seconds(self, size: int) -> list[float]:
        if size != self.size:
            self.batches = []  # before the next ones take memory
            for trial in self.trials:
                data = trial.prepare(size)
            with contextlib.closing(data.windows(0, 1)) as windows:
                self.window = next(windows)
                self.batches, self.size = [*self.window.batches], size
        return [trial.seconds(self.window._replace(batches=iter(self.batches)), self.clock) for trial in self.trials]
