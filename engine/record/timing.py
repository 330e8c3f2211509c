"""Measures the time spent in each phase of the updates."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from engine.train.callback import PHASES, Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer
from utils.torch_internals import call_after_backward

MAX_MARKS = 10_000  # maximum between two reports: a few MB, enough for about 1200 updates of one micro-batch


class HostClock:
    """A clock for CPUs, where operations are synchronous."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """A clock for devices with a queue: a mark is an event in the queue.

    The clock never synchronises. Event times are read after the host has waited for a later operation in the queue.
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
    """Measures the seconds in each phase, since the last report and in the epoch so far."""

    def __init__(self, clock: HostClock | DeviceClock):
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []
        self.epoch_seconds: Counter[str] = Counter()  # by phase; in a resumed epoch, only since the resume

    @classmethod
    def on(cls, device: torch.device) -> "Timing":
        return cls(DeviceClock(device) if device.type in ("cuda", "xpu") else HostClock())

    def on_epoch_start(self, trainer: Trainer) -> None:
        self.epoch_seconds.clear()
        self.restart()

    def on_phase(self, trainer: Trainer, name: str) -> None:
        self._mark(name)

    def on_loss(self, trainer: Trainer, loss: torch.Tensor, is_last: bool) -> None:
        """Measure the communication that does not overlap with the backward pass.

        DDP waits for its all-reduces in a callback at the end of backward. Callbacks run in the order in which they
        were queued. The hook on the gradient of the loss queues our callback before DDP's, so ours runs first.
        Rejected: a communication hook, which would change DDP's code path.
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
        """Discard the marks since the last lap and start a new lap."""
        self._marks = []
        self._mark("other")

    def lap(self) -> dict[str, float]:
        """Return the seconds of each phase since the last lap. Call this after the host has waited for the device."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] += self._clock.seconds(start, end)
        # The current phase continues in the next lap. If the marks are full, the start of the current phase may be
        # missing, so the next lap starts without a mark.
        self._marks = self._marks[-1:] if len(self._marks) < MAX_MARKS else []
        return seconds


def shares(seconds: Mapping[str, float], device: torch.device) -> dict[str, float | None]:
    """Return the percentage of the time in each phase. MPS has no timed events, so only its data phase is known."""
    total = max(sum(seconds.values()), 1e-9)
    known = PHASES[:1] if device.type == "mps" else PHASES
    return {name: round(100 * seconds[name] / total, 2) if name in known else None for name in PHASES}
