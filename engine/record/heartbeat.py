"""Keeps status.json up to date between two saves: where training is, and when it will end."""

import time
from collections.abc import Callable

from engine.train.counters import Report
from engine.train.trainer import Callback, Trainer


class Pace:
    """How many seconds are left of the whole run, at its pace since the first update of this start."""

    def __init__(self, num_updates: int, clock: Callable[[], float] = time.monotonic):
        """`num_updates`: of the whole run."""
        self._num_updates, self._clock = num_updates, clock
        self._first: tuple[int, float] | None = None  # step and time of the first report

    def note(self, step: int) -> None:
        """So many updates are done; it counts from the first call on, because the first update takes longer."""
        self._first = self._first or (step, self._clock())

    def seconds_left(self, step: int) -> float | None:
        first_step, first_time = self._first or (step, 0.0)
        if step == first_step:
            return None
        return (self._num_updates - step) * (self._clock() - first_time) / (step - first_step)

    def restart(self) -> None:
        self._first = None


class Heartbeat(Callback):
    """Tells `beat` after each report how far the training is, and how many seconds are left."""

    def __init__(self, pace: Pace, beat: Callable[..., None]):
        self._pace, self._beat = pace, beat

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._pace.note(trainer.step)
        left = self._pace.seconds_left(trainer.step)
        position = {"epoch": trainer.epoch, "step": trainer.step}
        self._beat(position=position, eta_seconds=None if left is None else round(left))

    def on_rollback(self, trainer: Trainer) -> None:
        self._pace.restart()
