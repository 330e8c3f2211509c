"""Saves in the background: the state is copied to host memory, and a thread writes the copy."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from engine.checkpoint.format import held_by, remove_old, remove_unused_parts, save_checkpoint, start_of_streak
from engine.checkpoint.host_copy import HostCopy
from engine.evaluation.scores import Best
from utils.errors import cause_of

BEST = "best.pth"


class AsyncSaver:
    """Writes last.pth and its hard links, one save at a time: a second save waits until the first is on disk.

    Dropping the first instead could lose a best.pth or checkpoint-N.pth, and would need memory for two copies.
    """

    def __init__(
        self, folder: Path, keep: int, device: torch.device, warn: Callable[[str], None], weights_only: bool = False
    ):
        self._path, self._keep, self._warn, self._weights_only = folder / "last.pth", keep, warn, weights_only
        self._host_copy = HostCopy(device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self.failure = ""  # why the last save failed; empty if it did not
        self.seconds = 0.0  # for which saving blocked training
        self.longest = 0.0  # seconds of the longest save, until it was on disk
        self.newest: dict[str, int] = {}  # finished epochs and steps of the last.pth on disk
        self.best = Best()  # what the best.pth on disk holds
        self.on_saved: Callable[[], None] = lambda: None  # called in the writing thread after every save

    def save(self, state: dict, also: list[str]) -> None:
        """Copy the state and write it in the background. `also`: further names of the file."""
        self.wait()
        with self._blocking(), self._warn_on_os_error():
            start = time.perf_counter()
            self._submit(self._host_copy.take(state), also, start)

    def _submit(self, copy: dict, also: list[str], start: float) -> None:
        self._writing = self._thread.submit(self._write, copy, also, start)

    def wait(self) -> None:
        """Wait for the save in progress."""
        if self._writing:
            with self._blocking():
                writing, self._writing = self._writing, None
                writing.result()  # raises programming errors

    def _write(self, state: dict, also: list[str], start: float) -> None:
        # A checkpoint within a series of skipped updates never replaces the last one before it.
        keeps_former = self.newest.get("step", 0) <= start_of_streak(state)
        with self._warn_on_os_error():
            self._put(state, also, keeps_former)
            self.failure = ""
            self.newest = {"epoch": state["epoch"] + 1, "step": state["step"]}
            if BEST in also:
                self.best = Best(*state["progress"]["best"])
            self.on_saved()
            self.longest = max(self.longest, time.perf_counter() - start)
        try:
            self._tidy()
        except OSError as error:
            self._warn(f"cannot remove old checkpoints from {self._path.parent} ({cause_of(error)})")

    def look(self) -> None:
        """Find out what the files on the disk hold; a save that failed may have written some of them."""
        last, best = held_by(self._path), held_by(self._path.with_name(BEST))
        if last:
            self.newest = {"epoch": last["epoch"], "step": last["step"]}
        self.best = Best(*best.get("best", ()))

    def _put(self, state: dict, also: list[str], keeps_former: bool) -> None:
        """Write a state under its names."""
        save_checkpoint(self._path, state, also, keeps_former, self._weights_only)

    def _tidy(self) -> None:
        """Remove old checkpoints."""
        remove_old(self._path.parent, self._keep)
        remove_unused_parts(self._path.parent)

    @contextlib.contextmanager
    def _warn_on_os_error(self) -> Iterator[None]:
        """A full disk does not end a run: space may become free."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.failure = cause_of(error)
            self.look()
            left = f"on the disk it is of step {self.newest['step']}" if self._path.exists() else "there is none yet"
            self._warn(f"cannot save {self._path} ({self.failure}); {left}; training goes on")

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
