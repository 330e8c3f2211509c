"""Saves in the background: the state is copied to host memory, and a thread writes the copy."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from engine.checkpoint.format import progress_in, remove_old, remove_unused_parts, save_checkpoint, start_of_streak
from engine.evaluation.scores import Best
from engine.parallel import is_sharded
from utils.distributed import Process
from utils.errors import cause_of
from utils.host import has_streams
from utils.log import Log
from utils.runs import BEST

CHUNK = 2**26  # bytes: page-locked memory is allocated in powers of two, so a larger piece would waste much


class AsyncSaver:
    """Writes last.pth and its hard links, one save at a time: a second save waits until the first is on disk.

    Dropping the first instead could lose a best.pth or checkpoint-N.pth, and would need memory for two copies.
    """

    def __init__(self, folder: Path, keep: int, device: torch.device, warn: Callable[[str], None]):
        self._path, self._keep, self._warn = folder / "last.pth", keep, warn
        self._host_copy = HostCopy(device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self.failure = ""  # why the last save failed; empty if it did not
        self.seconds = 0.0  # for which saving blocked training
        self.longest = 0.0  # seconds of the longest save, until it was on disk
        self.newest: dict[str, int] = {}  # finished epochs and steps of the last.pth on disk
        self.run: dict[str, str] | None = None  # what the last.pth on disk says of its run
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
            self.run = state.get("run")
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
        last, best = progress_in(self._path), progress_in(self._path.with_name(BEST))
        if last:
            self.newest = {"epoch": last["epoch"], "step": last["step"]}
            self.run = last.get("run")
        self.best = Best(*best.get("best", ()))

    def _put(self, state: dict, also: list[str], keeps_former: bool) -> None:
        """Write a state under its names."""
        save_checkpoint(self._path, state, also, keeps_former)

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


class HostCopy:
    """Memory for one copy. The next copy reuses it and overwrites the former one."""

    def __init__(self, device: torch.device):
        self._device, self._has_streams = device, has_streams(device)
        self._layout: list[tuple] = []
        self._copies: list[Tensor] = []

    def take(self, state: dict) -> dict:
        """Copy the state; from a device with streams asynchronously, with one synchronisation at the end."""
        tensors: list[Tensor] = []
        map_tensors(state, tensors.append)
        layout = [(each.dtype, each.shape, each.stride()) for each in tensors]
        if layout != self._layout:
            self._copies = []  # freed first, so that memory never holds two
            self._copies, self._layout = allocate(tensors, self._has_streams), layout
        for mine, tensor in zip(self._copies, tensors, strict=True):
            mine.copy_(tensor, non_blocking=self._has_streams)
        if self._has_streams:
            torch.accelerator.current_stream(self._device).synchronize()
        copies = iter(self._copies)
        return map_tensors(state, lambda tensor: next(copies))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply `change` to all tensors in nested dicts, lists and tuples, in a fixed order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        new = copy(value)  # not value.copy(): a state_dict carries module versions as an attribute (_metadata)
        new.update((key, map_tensors(each, change)) for key, each in value.items())
        return new
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(each, change) for each in value)
    return value


def allocate(tensors: Iterable[Tensor], pinned: bool) -> list[Tensor]:
    """Host tensors of the same types, shapes and strides, each with its own storage, as torch.save needs."""
    copies, start, chunk = [], 0, torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # dense, even if the tensor is a view
        if start + like.nbytes > chunk.numel():
            start, chunk = 0, torch.empty(max(CHUNK, like.nbytes), dtype=torch.uint8, pin_memory=pinned)
        storage = chunk.untyped_storage()[start : start + like.nbytes]
        copies.append(torch.empty(0, dtype=tensor.dtype).set_(storage, 0, like.shape, like.stride()))
        start += (like.nbytes // 64 + 1) * 64  # aligned to cache lines; never two at one address
    return copies


def make_saver(config: Config, folder: Path, process: Process, log: Log) -> AsyncSaver:
    """The saver for DIST.STRATEGY. A collective."""
    if is_sharded(config, process):
        from engine.checkpoint.sharded_saver import ShardedSaver

        return ShardedSaver(folder, config.KEEP_CHECKPOINTS, process, log.warn if process.is_first else log.note)
    return AsyncSaver(folder, config.KEEP_CHECKPOINTS, process.device, log.warn)
