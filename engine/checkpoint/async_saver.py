"""Saving beside the training: the state is copied at once, and a thread brings the copy to the disk."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from engine.checkpoint.format import prune, save_checkpoint, start_of_streak, sweep
from engine.checkpoint.host_copy import HostCopy


class AsyncSaver:
    """Writes last.pth and its other names, one save at a time: a second one waits until the first is on the disk.

    It could have replaced the first instead; but then a best.pth or checkpoint-N.pth might never be written, and two
    copies of the state would lie in memory.
    """

    def __init__(self, folder: Path, keep: int, device: torch.device, warn: Callable[[str], None]):
        self._path, self._keep, self._warn = folder / "last.pth", keep, warn
        self._host_copy = HostCopy(device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self.failed = False  # the last save
        self.seconds = 0.0  # that training stood still for it
        self.longest = 0.0  # seconds from the start of a save until it was on the disk
        self.newest: dict[str, int] = {}  # finished epochs and steps that are on the disk
        self.on_saved: Callable[[], None] = lambda: None  # called in the thread, when `newest` is

    def save(self, state: dict, also: list[str]) -> None:
        """Copy the state; the rest happens beside what comes next. `also`: further names for the file."""
        self.wait()
        with self._blocking(), self._warn_on_os_error():
            start = time.perf_counter()
            self._submit(self._host_copy.take(state), also, start)

    def _submit(self, copy: dict, also: list[str], start: float) -> None:
        self._writing = self._thread.submit(self._write, copy, also, start)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing:
            with self._blocking():
                writing, self._writing = self._writing, None
                writing.result()  # raises what is our own mistake

    def _write(self, state: dict, also: list[str], start: float) -> None:
        # A checkpoint amid a streak of skipped updates never takes the place of the last one from before it.
        keeps_former = self.newest.get("step", 0) <= start_of_streak(state)
        with self._warn_on_os_error():
            self._put(state, also, keeps_former)
            self.newest = {"epoch": state["epoch"] + 1, "step": state["step"]}
            self.on_saved()
            self._tidy()
            self.failed = False
            self.longest = max(self.longest, time.perf_counter() - start)

    def _put(self, state: dict, also: list[str], keeps_former: bool) -> None:
        """Bring a state to the disk under its names."""
        save_checkpoint(self._path, state, also, keeps_former)

    def _tidy(self) -> None:
        """Remove what is not kept."""
        prune(self._path.parent, self._keep)
        sweep(self._path.parent)

    @contextlib.contextmanager
    def _warn_on_os_error(self) -> Iterator[None]:
        """A full disk must not end a run that may still find room."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.failed = True
            self._warn(f"cannot save {self._path} ({error}); the checkpoint before it is untouched, training goes on")

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
