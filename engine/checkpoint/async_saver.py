"""Background saves: the state is copied to host memory, and a thread writes the copy."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.format import progress_in, remove_old, remove_unused_parts, save_checkpoint
from engine.evaluation.best import Best
from models.weights.sharded import changed
from utils.errors import cause_of
from utils.host import has_streams
from utils.runs import BEST

CHUNK = 2**26  # bytes; page-locked memory is allocated in powers of two, so larger chunks would waste memory


class AsyncSaver:
    """Writes last.pth and its hard links. Saves run one at a time: a second save waits until the first is on disk.

    Rejected: dropping the first save. That could lose a best.pth or checkpoint-N.pth and needs memory for two copies.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        device: torch.device,
        warn: Callable[[str], None],
        check_folder: Callable[[], None] = lambda: None,
    ):
        """`check_folder` raises FolderMoved if the folder now belongs to another run."""
        self._path, self._keep, self._warn, self._check_folder = folder / "last.pth", keep, warn, check_folder
        self._host_copy = HostCopy(device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None
        self.failure = ""  # why the last save failed, or empty if it succeeded
        self.longest = 0.0  # seconds that the slowest save took to reach the disk
        self.newest: dict[str, int] = {}  # numbers of finished epochs and steps in the last.pth on disk
        self.run: dict[str, str] | None = None  # the identity of the run in the last.pth on disk
        self.best = Best()  # the best epoch recorded in the best.pth on disk
        self.on_saved: Callable[[], None] = lambda: None  # called in the writing thread after every save

    def save(self, state: dict, extra_names: list[str]) -> None:
        """Copy the state and write it in the background. `extra_names` lists further names for the file."""
        self.wait()
        with self._warn_on_os_error():
            start = time.perf_counter()
            self._submit(self._host_copy.take(state), extra_names, start)

    def _submit(self, copy: dict, extra_names: list[str], start: float) -> None:
        self._writing = self._thread.submit(self._write, copy, extra_names, start)

    def wait(self) -> None:
        """Wait for the save in progress."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()  # raises all errors except I/O errors, which have become warnings

    def _write(self, state: dict, extra_names: list[str], start: float) -> None:
        # Checkpoints within a streak of skipped updates never replace the last checkpoint before the streak.
        start_of_streak = state["step"] - int(state["progress"]["skips_in_a_row"])
        keep_previous = self.newest.get("step", 0) <= start_of_streak
        with self._warn_on_os_error():
            self._put(state, extra_names, keep_previous)
            self.failure = ""
            self.newest = {"epoch": state["epoch"] + 1, "step": state["step"]}
            self.run = state.get("run")
            if BEST in extra_names:
                self.best = Best.from_state(state["progress"]["best"])
            self.on_saved()
            self.longest = max(self.longest, time.perf_counter() - start)
        try:
            self._tidy()
        except OSError as error:
            self._warn(f"cannot remove old checkpoints from {self._path.parent} ({cause_of(error)})")

    def reload_from_disk(self) -> None:
        """Read the progress in last.pth and best.pth, because a failed save may have written one of them."""
        last, best = progress_in(self._path), progress_in(self._path.with_name(BEST))
        if last:
            self.newest = {"epoch": last["epoch"], "step": last["step"]}
            self.run = last.get("run")
        self.best = Best.from_state(best.get("best", ()))

    def _put(self, state: dict, extra_names: list[str], keep_previous: bool) -> None:
        """Write a state to disk under all of its names."""
        save_checkpoint(self._path, state, extra_names, keep_previous, self._check_folder)

    def _tidy(self) -> None:
        """Remove old checkpoints, and shards that no checkpoint uses."""
        self._check_folder()
        remove_old(self._path.parent, self._keep)
        remove_unused_parts(self._path.parent)

    @contextlib.contextmanager
    def _warn_on_os_error(self) -> Iterator[None]:
        """Turn I/O errors into warnings. A full disk does not end a run, because space may become free."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.failure = cause_of(error)
            self.reload_from_disk()
            left = (
                f"the file is still from step {self.newest['step']}"
                if self._path.exists()
                else "there is no checkpoint yet"
            )
            self._warn(f"cannot save {self._path} ({self.failure}); {left}; training continues")


class HostCopy:
    """Host memory for one copy of the state. Each copy reuses the memory of the previous copy."""

    def __init__(self, device: torch.device):
        self._device, self._has_streams = device, has_streams(device)
        self._layout: list[tuple] = []
        self._copies: list[Tensor] = []

    def take(self, state: dict) -> dict:
        """Return a copy of the state. Devices with streams copy asynchronously and synchronise once at the end."""
        tensors: list[Tensor] = []
        changed(state, lambda place, value: tensors.append(value) if isinstance(value, Tensor) else None)
        layout = [(each.dtype, each.shape, each.stride()) for each in tensors]
        if layout != self._layout:
            self._copies = []  # freed first, so that there are never two copies in memory
            self._copies, self._layout = allocate(tensors, self._has_streams), layout
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=self._has_streams)
        if self._has_streams:
            torch.accelerator.current_stream(self._device).synchronize()
        copies = iter(self._copies)
        return changed(state, lambda place, value: next(copies) if isinstance(value, Tensor) else value)


def allocate(tensors: Iterable[Tensor], pinned: bool) -> list[Tensor]:
    """Return host tensors of the same types, shapes and strides, each with its own storage, as torch.save requires."""
    copies, start, chunk = [], 0, torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # dense, even if the tensor is a view
        if start + like.nbytes > chunk.numel():
            start, chunk = 0, torch.empty(max(CHUNK, like.nbytes), dtype=torch.uint8, pin_memory=pinned)
        storage = chunk.untyped_storage()[start : start + like.nbytes]
        copies.append(torch.empty(0, dtype=tensor.dtype).set_(storage, 0, like.shape, like.stride()))
        start += (like.nbytes // 64 + 1) * 64  # aligned to cache lines; no two tensors share an address
    return copies
