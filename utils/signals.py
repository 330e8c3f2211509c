"""Being told to stop: a handler that only notes it, so that the run can save first."""

import os
import signal


class StopSignal:
    """Notes SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning); a second one ends the process at once."""

    def __init__(self):
        self.number = 0
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(each, self._note)

    def _note(self, number: int, frame) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
