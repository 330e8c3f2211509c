"""Signals that stop a run: the handler only records them, so that the run can save first."""

import os
import signal
import time


class StopSignal:
    """Notes SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning); a second one ends the process at once.

    Unless it comes within seconds: a signal to the whole group reaches a worker twice, as torchrun passes its own on.
    """

    SECONDS_TO_REPEAT = 3.0

    def __init__(self):
        self.number = 0
        self._noted = 0.0
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(each, self._note)

    def _note(self, number: int, frame) -> None:
        if self.number and time.monotonic() - self._noted > self.SECONDS_TO_REPEAT:
            os._exit(128 + number)
        if not self.number:
            self.number, self._noted = number, time.monotonic()
