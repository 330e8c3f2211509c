"""What ends a run before its last epoch: a signal, the end of its time, or gradients that are not finite any more."""

import time
from collections.abc import Callable

from engine.train.callbacks import Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer

TIME_IS_UP = 1  # agreed on like a signal's number, and below those that are obeyed: a signal goes first


class NonFinite(Exception):
    """Too many updates in a row had a non-finite gradient. If the run cannot go back, it ends with exit code 3."""

    def __init__(self, message: str, streak: range):
        super().__init__(message)
        self.streak = streak  # the updates that were skipped


class Stopped(Exception):
    """A signal told the run to stop, or its time is up (TIME_IS_UP), and all processes agreed on the step."""

    def __init__(self, number: int):
        self.number = number


class SkipLimit(Callback):
    """Ends the run after so many skipped updates in a row (PRECISION.MAX_CONSECUTIVE_SKIPS)."""

    def __init__(self, max_skips: int, advice: Callable[[], str]):
        """`advice`: what to change, as far as it is known by then."""
        self._max_skips, self._advice = max_skips, advice

    def on_report(self, trainer: Trainer, report: Report) -> None:
        skips = report.skips_in_a_row
        if skips >= self._max_skips:
            advice = self._advice() or "lower TRAIN.BASE_LR, set TRAIN.GRAD_CLIP, or in float16 try -amp_dtype bfloat16"
            raise NonFinite(
                f"{skips} updates in a row had a non-finite gradient, up to step {trainer.step}; the weights are those "
                f"before them; {advice}",
                range(trainer.step - skips, trainer.step),
            )


class TimeLimit(Callback):
    """Tells when a run must save and end, so that this is done before its time is over (RUN.MAX_TIME)."""

    def __init__(
        self,
        seconds: float,
        start: float,
        longest_save: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`start`: what the clock showed at the program's start; `longest_save`: seconds, of the saves so far."""
        self._end, self._longest_save, self._clock = start + seconds, longest_save, clock
        self._update = self._turn = 0.0  # longest so far: an update, and an epoch's last one with all up to the next
        self._before: tuple[float, int] | None = None  # when it was asked last, and with which number

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        """Several processes act on the answer one update later, and a save may have to wait for the one before.

        So time is left for two of each, and for the evaluation if it comes between.
        """
        now = self._clock()
        if self._before:
            before, left_before = self._before
            if left_before == 1:
                self._turn = max(self._turn, now - before)
            else:
                self._update = max(self._update, now - before)
        self._before = now, updates_left
        turn = self._turn if updates_left <= 2 else 0
        return now + 2 * (self._update + self._longest_save()) + turn >= self._end
