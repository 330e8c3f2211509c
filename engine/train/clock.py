"""Measures the time that updates spend in each phase."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from utils.torch_internals import call_after_backward

# The phases of an update. All but "optimizer" repeat for each micro-batch. "copy" includes the copy to the device
# (unless loading/ahead.py has prefetched the batch), normalising and mixing. "communication" is the part of the
# backward pass that only waits for the all-reduce.
PHASES = ("data", "copy", "forward", "backward", "communication", "optimizer", "other")
MAX_MARKS = 15_000  # maximum between two reports: a few MB, enough for about 1500 updates of one micro-batch

T = TypeVar("T")


class HostTime:
    """The time of CPUs, where operations are synchronous."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceTime:
    """The time of devices with a queue: a mark is an event in the queue.

    It never synchronises. Event times are read after the host has waited for a later operation in the queue.
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


class Clock:
    """Measures the seconds of each phase, since the last lap and in the epoch so far.

    `with clock("forward"):` measures a block. The time between blocks is "other".
    """

    def __init__(
        self,
        device: torch.device,
        host_or_device: HostTime | DeviceTime,
        label: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        """`label`: the context of a block, by the name of its phase; the profiler shows the names in its trace."""
        self._device, self._time, self._label = device, host_or_device, label
        self._marks: list[tuple[str, Any]] = []
        self._epoch: Counter[str] = Counter()  # in a resumed epoch, only since the resume

    @classmethod
    def on(cls, device: torch.device, is_traced: bool = False) -> "Clock":
        """Return a clock for this device. `is_traced`: whether the profiler shows the phases (-profile)."""
        times = DeviceTime(device) if device.type in ("cuda", "xpu") else HostTime()
        return cls(device, times, torch.profiler.record_function) if is_traced else cls(device, times)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._mark(name)
        with self._label(name):
            yield
        self._mark("other")

    def waiting_for(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches. The time until each is there is "data"."""
        iterator = iter(batches)
        while True:
            with self("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def mark_communication(self, loss: Tensor) -> None:
        """Measure the communication that does not overlap with the backward pass of this loss.

        DDP waits for its all-reduces in a callback at the end of backward. Callbacks run in the order in which they
        were queued. The hook on the gradient of the loss queues our callback before DDP's, so ours runs first.
        Rejected: a communication hook, which would change DDP's code path.
        """
        mark = partial(self._mark, "communication")
        loss.register_hook(lambda gradient: call_after_backward(mark))

    def _mark(self, name: str) -> None:
        if len(self._marks) < MAX_MARKS:
            self._marks.append((name, self._time.now()))

    def start_epoch(self) -> None:
        """Discard the marks since the last lap and the sums of the epoch, and start a new lap."""
        self._epoch.clear()
        self._marks = []
        self._mark("other")

    def lap(self) -> dict[str, float]:
        """Return the seconds of each phase since the last lap. Call this after the host has waited for the device."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] += self._time.seconds(start, end)
        # The current phase continues in the next lap. If the marks are full, the start of the current phase may be
        # missing, so the next lap starts without a mark.
        self._marks = self._marks[-1:] if len(self._marks) < MAX_MARKS else []
        self._epoch.update(seconds)
        return seconds

    def shares(self, seconds: dict[str, float] | None = None) -> dict[str, float | None]:
        """Return the percentage of each phase in these seconds, by default in those of the epoch so far.

        MPS has no timed events, so only its data phase is known.
        """
        seconds = self._epoch if seconds is None else seconds
        total = max(sum(seconds.values()), 1e-9)
        known = PHASES[:1] if self._device.type == "mps" else PHASES
        return {name: round(100 * seconds[name] / total, 2) if name in known else None for name in PHASES}
