"""Keeps status.json up to date between two saves: where training is, and when it will end."""

import time
from collections.abc import Callable

from engine.train.callbacks import Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer


class Heartbeat(Callback):
    """Tells `beat` after each report how far the training is, and how many seconds are left at the pace so far."""

    def __init__(self, num_updates: int, beat: Callable[..., None], clock: Callable[[], float] = time.monotonic):
        """`num_updates`: of the whole run."""
        self._num_updates, self._beat, self._clock = num_updates, beat, clock
        self._first: tuple[int, float] | None = None  # step and time of the first report

    def on_report(self, trainer: Trainer, report: Report) -> None:
        now = self._clock()
        first_step, first_time = self._first = self._first or (trainer.step, now)
        done, left = trainer.step - first_step, self._num_updates - trainer.step
        eta = round(left * (now - first_time) / done) if done else None
        self._beat(position={"epoch": trainer.epoch, "step": trainer.step}, eta_seconds=eta)

    def on_rollback(self, trainer: Trainer) -> None:
        self._first = None
