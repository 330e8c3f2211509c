"""How long each phase of the updates takes, how long the run has still to go, and a profiler's trace."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule, supported_activities

from configs.schema import Config, to_seconds
from datasets.batch_order import Order
from engine.train.counters import EpochResult, Report
from engine.train.trainer import PHASES, Callback, Trainer
from utils.errors import cause_of
from utils.text import counted, format_duration
from utils.torch_internals import call_after_backward

MAX_MARKS = 10_000  # between two reports: about 1200 updates of one micro-batch, a few MB


class HostClock:
    """The clock of CPUs, where operations are synchronous."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """The clock of devices with a queue: a mark is an event in the queue.

    Never synchronises: event times are read after the host has waited for something later in the queue.
    """

    def __init__(self, device: torch.device):
        self._module = getattr(torch, device.type)
        self._stream = self._module.current_stream(device)

    def now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000


class Timing(Callback):
    """Seconds of each phase since the last report, and in the epoch so far."""

    def __init__(self, clock: HostClock | DeviceClock):
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []
        self._range = contextlib.ExitStack()
        self.shows_ranges = False  # whether phases appear in a profiler's trace
        self.epoch_seconds: Counter[str] = Counter()  # per phase; without the part of an epoch before a resume

    @classmethod
    def on(cls, device: torch.device) -> "Timing":
        return cls(DeviceClock(device) if device.type in ("cuda", "xpu") else HostClock())

    def on_epoch_start(self, trainer: Trainer) -> None:
        self.epoch_seconds.clear()
        self.restart()

    def on_phase(self, trainer: Trainer, name: str) -> None:
        self._mark(name)
        self._range.close()
        if self.shows_ranges and name != "other":
            self._range.enter_context(torch.profiler.record_function(name))

    def on_loss(self, trainer: Trainer, loss: torch.Tensor, is_last: bool) -> None:
        """Measure the communication that does not overlap with the backward.

        DDP waits for its all-reduces in a callback at the end of backward. Callbacks run in the order in which they
        were queued, and this one, queued by the gradient of the loss, is the first. A communication hook would change
        DDP's path.
        """
        if is_last and trainer.process.world_size > 1:
            loss.register_hook(lambda gradient: call_after_backward(lambda: self._mark("communication")))

    def on_report(self, trainer: Trainer, report: Report) -> None:
        seconds = self.lap()
        self.epoch_seconds.update(seconds)
        report.seconds, report.shares = sum(seconds.values()), shares(seconds, trainer.process.device)

    def _mark(self, name: str) -> None:
        if len(self._marks) < MAX_MARKS:
            self._marks.append((name, self._clock.now()))

    def restart(self) -> None:
        """Discard the marks since the last lap and start a new one."""
        self._marks = []
        self._range.close()
        self._mark("other")

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap. Call it after the host has waited for the device."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] += self._clock.seconds(start, end)
        # The current phase continues in the next lap, unless there was no space left for its end.
        self._marks = self._marks[-1:] if len(self._marks) < MAX_MARKS else []
        return seconds


def shares(seconds: Mapping[str, float], device: torch.device) -> dict[str, float | None]:
    """Percent of the time in each phase. On MPS, a queue without timed events, only waiting for data is known."""
    total = max(sum(seconds.values()), 1e-9)
    known = PHASES[:1] if device.type == "mps" else PHASES
    return {name: round(100 * seconds[name] / total, 2) if name in known else None for name in PHASES}


ENOUGH = 10.0  # seconds of updates by which the whole run is judged


class Pace(Callback):
    """How many seconds are left of the whole run, by what updates and the pauses between epochs took since the first report.

    A pause is mostly an evaluation. Until one was seen, that is taken for a forward of its images, a third of a training step.
    """

    def __init__(
        self,
        config: Config,
        order: Order,
        num_evaluated: int,
        start: float,
        beat: Callable[..., None] = dict,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`num_evaluated`: validation images. `beat`: takes after each report how far the training is. `start`: of the program."""
        self._config, self._order, self._beat, self._say, self._clock = config, order, beat, say, clock
        self._limit = start + to_seconds(config.START.MAX_TIME) if config.START.MAX_TIME else math.inf
        self._evaluation = num_evaluated * order.steps_per_epoch / order.num_images / 3  # in updates
        self._evaluation *= 1 + config.TRAIN.MODEL_EMA
        self._num_updates = config.TRAIN.NUM_EPOCHS * order.steps_per_epoch
        self._is_told = config.TRAIN.BUDGET is not None  # which tells it
        self._begin()

    def _begin(self) -> None:
        self._first: tuple[int, float] | None = None  # step and time of the first report: the first update takes longer
        self._last = self._paused = 0.0  # when training was seen last; seconds of all pauses
        self._num_evaluations = 0

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._pause()

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._last = self._clock()
        self._first, self._num_updates = self._first or (trainer.step, self._last), trainer.schedule.num_updates
        left = self.seconds_left(trainer.step, trainer.epoch)
        position = {"epoch": trainer.epoch, "step": trainer.step}
        self._beat(position=position, eta_seconds=None if left is None else round(left))
        if left is not None and not self._is_told and self._last - self._first[1] >= ENOUGH:
            self._is_told = True
            self._say(f"time: {self.describe(trainer.step, left)}")

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        self._pause()
        self._num_evaluations += bool(result.scores)

    def on_rollback(self, trainer: Trainer) -> None:
        self._begin()

    def _pause(self) -> None:
        """Count the time since training was seen as one in which no update was done."""
        if self._first:
            last, self._last = self._last, self._clock()
            self._paused += self._last - last

    def seconds_left(self, step: int, num_done: int) -> float | None:
        """`num_done`: epochs that are trained and evaluated."""
        first_step, first_time = self._first or (step, 0.0)
        if step == first_step:
            return None
        return self.predict(step, num_done, (self._clock() - first_time - self._paused) / (step - first_step))

    def predict(self, step: int, num_done: int, each: float) -> float:
        """The seconds that are left from this step on and after so many epochs, if an update takes `each`."""
        num_epochs, frequency = math.ceil(self._num_updates / self._order.steps_per_epoch), self._config.VALIDATE_FREQ
        left = [number % frequency == 0 or number == num_epochs for number in range(num_done + 1, num_epochs + 1)]
        return (self._num_updates - step) * each + sum(left) * self.pause(each)

    def pause(self, each: float) -> float:
        """The seconds of an evaluation, if an update takes `each`."""
        return self._paused / self._num_evaluations if self._num_evaluations else self._evaluation * each

    def describe(self, step: int, left: float) -> str:
        """How long the run still takes, when that is over, and how far it gets before RUN.MAX_TIME."""
        end, allowed = time.localtime(time.time() + left), self._limit - self._clock()
        short = f"{math.ceil(left)} s" if left < 100 else f"{left / 60:.0f} min"
        about = short if left < 3600 else format_duration(left)
        text = f"about {about}, until {time.strftime('%H:%M' if left < 20 * 3600 else '%Y-%m-%d %H:%M', end)}"
        if left <= allowed:
            return text
        num_epochs, num_steps = self._config.TRAIN.NUM_EPOCHS, self._order.steps_per_epoch
        reached = (step + (num_epochs * num_steps - step) * max(allowed, 0) / left) / num_steps
        limit = f"RUN.MAX_TIME, {self._config.START.MAX_TIME}, ends this start before that"
        return f"{text}; {limit}, after about {reached:.1f} of {counted(num_epochs, 'epoch')}"


WARM_UPDATES = 5  # before tracing: the first updates are not typical


class Profiler(Callback):
    """Traces `num_updates` updates of this process."""

    def __init__(self, num_updates: int, path: Path, timing: Timing, say: Callable[[str], None]):
        self._path, self._timing, self._say = path, timing, say
        self._profile = profile(
            activities=supported_activities(),
            # One warm-up update is traced and discarded, because tracing starts slowly.
            schedule=schedule(wait=WARM_UPDATES, warmup=1, active=num_updates, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._is_done = False
        timing.shows_ranges = True
        self._profile.start()

    def on_update(self, trainer: Trainer) -> None:
        if not self._is_done:
            self._profile.step()

    def close(self) -> None:
        """Write the trace so far."""
        if not self._is_done:
            self._profile.stop()
        if not self._is_done:
            self._say(f"PROFILE: the run ended before its update {WARM_UPDATES + 2}, so there is no trace")

    def _write(self, traced: profile) -> None:
        self._is_done, self._timing.shows_ranges = True, False
        try:
            traced.export_chrome_trace(str(self._path))
        except OSError as error:
            self._say(f"warning: cannot write {self._path} ({cause_of(error)}); training continues")
        else:
            self._say(f"profile: {self._path}; open it at https://ui.perfetto.dev")
