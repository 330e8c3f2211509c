"""status.json: what a run is doing, or why it ended. docs/resuming.md describes every key."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.errors import cause_of
from utils.files import write_text

VERSION = 1  # of the keys; changes only when one changes its meaning or goes


class Status:
    """Writes status.json; a key keeps its value from one state to the next. What cannot be written is a warning."""

    SECONDS_BETWEEN_BEATS = 10.0

    def __init__(self, folder: Path, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._path, self._warn, self._clock = folder / "status.json", warn, clock
        self._facts: dict[str, Any] = {
            "version": VERSION,
            "state": "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": now(),
        }
        self._lock = threading.Lock()  # the thread that saves writes too
        self._beat = threading.Thread()
        self._last_write = clock()

    def add(self, **facts) -> None:
        """Facts for the next state."""
        with self._lock:
            self._facts |= facts

    def set(self, state: str, **facts) -> None:
        """Write a state. Of the facts, None removes a key."""
        if self._beat.ident:
            self._beat.join()
        self._write(state=state, time=now(), **facts)

    def beat(self, **facts) -> None:
        """Show that the run is alive, at most every 10 s; a thread writes, so that a slow disk does not delay training."""
        if self._clock() - self._last_write >= self.SECONDS_BETWEEN_BEATS and not self._beat.is_alive():
            self._beat = threading.Thread(target=self._write, kwargs=facts, daemon=True)
            self._beat.start()

    def _write(self, **facts) -> None:
        with self._lock:
            self._last_write = self._clock()
            self._facts |= {**facts, "heartbeat": now()}
            content = {key: value for key, value in self._facts.items() if value is not None}
            try:
                write_text(self._path, json.dumps(content, indent=2) + "\n")
            except OSError as error:
                self._warn(f"cannot write {self._path} ({cause_of(error)}), which should say: {content['state']}")


def now() -> str:
    """Date and time with the time zone, as in 2026-01-02T03:04:05+0100."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
