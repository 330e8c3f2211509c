"""What ends a run before its last epoch: a signal, the end of its time, or gradients that are not finite any more."""

import time
from collections.abc import Callable

TIME_IS_UP = 1  # agreed on as signals are, and less than the numbers of those that are obeyed: a signal goes first


class NonFinite(Exception):
    """Too many updates in a row had a non-finite gradient. If the run cannot go back, it ends with exit code 3."""

    def __init__(self, message: str, streak: range):
        super().__init__(message)
        self.streak = streak  # the updates that were skipped


class Stopped(Exception):
    """A signal told the run to stop, or its time is up (TIME_IS_UP), and all processes agreed on the step."""

    def __init__(self, number: int):
        self.number = number


class TimeLimit:
    """Tells when a run must save and end, so that this is done before its time is over."""

    def __init__(self, seconds: float, start: float, clock: Callable[[], float] = time.monotonic):
        """`start`: what the clock showed at the program's start."""
        self._end, self._clock = start + seconds, clock
        self._update = self._turn = 0.0  # longest so far: an update, and an epoch's last one with all up to the next
        self._before: tuple[float, int] | None = None  # when it was asked last, and with which number

    def is_near(self, num_left: int, save: float) -> bool:
        """Asked before each update. `num_left`: updates to the epoch's end; `save`: seconds of the longest save so far.

        Several processes act on the answer one update later, and a save may have to wait for the one before: so time is
        left for two of each, and for the evaluation if it comes between.
        """
        now = self._clock()
        if self._before:
            before, num_left_before = self._before
            if num_left_before == 1:
                self._turn = max(self._turn, now - before)
            else:
                self._update = max(self._update, now - before)
        self._before = now, num_left
        return now + 2 * (self._update + save) + (self._turn if num_left <= 2 else 0) >= self._end
