"""Signals that stop a run: those it notes, so that it can save first, and the one that follows the end of its launcher."""

import ctypes
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


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Linux: ask for this signal when the launcher dies, even by kill -9, so that no orphan holds the device."""
    if os.uname().sysname == "Linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)
