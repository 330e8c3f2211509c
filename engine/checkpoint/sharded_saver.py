"""Saves one file per process (DIST.STRATEGY fsdp2), so that no process ever has the whole state in memory.

Each process writes its rows of all large tensors into a folder below `shards/`, a new folder for every save. Once all
files are on disk, process 0 writes the rest of the state and the names of these files as last.pth.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.checkpoint.async_saver import AsyncSaver
from models.weights.sharded import FOLDER, PIECES, SHARDS
from utils.distributed import Process
from utils.errors import cause_of
from utils.files import FolderMoved, replacing, sync_folder
from utils.messages import gather_values


class Channel:
    """A separate process group, whose messages never mix with the messages of training. Creating it is a collective."""

    def __init__(self, process: Process):
        self._rank, self._world_size = process.rank, process.world_size
        # The timeout is long because a slow disk may exceed DIST.TIMEOUT. A dead process is noticed at once anyway.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if self._world_size > 1 else None

    def each(self, task: Callable[[], Any]) -> list:
        """Run the task in every process. Return all results, or raise the first error of any process.

        The error is an OSError or FolderMoved.
        """
        answers = [self._attempt(task)]
        if self._group:
            answers = gather_values(answers[0], self._group)
        for _, folder_moved, reason in answers:
            if reason:
                raise FolderMoved(reason) if folder_moved else OSError(reason)
        return [result for result, _, _ in answers]

    def first(self, task: Callable[[], Any]) -> Any:
        """Run the task in process 0 and return its result in every process. Errors are raised as in `each`."""
        return self.each(lambda: task() if self._rank == 0 else None)[0]

    def _attempt(self, task: Callable[[], Any]) -> tuple[Any, bool, str]:
        """Return the result, whether the error is a FolderMoved, and the reason of the error, or ""."""
        try:
            return task(), False, ""
        except FolderMoved as error:
            return None, True, str(error)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError when a disk is full
            return None, False, cause_of(error)


class ShardedSaver(AsyncSaver):
    """An AsyncSaver that writes a shard in every process. All its methods are collectives."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        process: Process,
        warn: Callable[[str], None],
        check_folder: Callable[[], None] = lambda: None,
    ):
        super().__init__(folder, keep, process.device, warn, check_folder)
        self._process, self._channel = process, Channel(process)

    def save(self, state: dict, extra_names: list[str]) -> None:
        self.wait()
        start, copy = time.perf_counter(), None
        with self._warn_on_os_error():
            copy = self._host_copy.take(state)
        # Submit in all processes or in none, because the writing threads wait for each other.
        if self._process.all_true(copy is not None):
            self._submit(copy, extra_names, start)
        else:
            self.failure = self.failure or "another process could not copy its part"

    def _put(self, state: dict, extra_names: list[str], keep_previous: bool) -> None:
        pieces = state.pop(PIECES)
        self._channel.each(self._check_folder)
        name = self._channel.first(lambda: self._new_folder(state["step"]))
        written = self._channel.each(lambda: self._put_pieces(name, pieces))
        index = {**state, SHARDS: written}
        self._channel.first(lambda: AsyncSaver._put(self, index, extra_names, keep_previous))

    def _new_folder(self, step: int) -> str:
        """Create a new folder, so that existing checkpoints stay complete. Return its path within the run folder."""
        shards = self._path.parent / FOLDER
        shards.mkdir(exist_ok=True)
        taken = {each.name for each in shards.iterdir()}
        names = (f"step-{step}{f'.{number}' if number > 1 else ''}" for number in range(1, len(taken) + 2))
        name = next(name for name in names if name not in taken)
        (shards / name).mkdir()
        sync_folder(shards)
        sync_folder(shards.parent)
        return f"{FOLDER}/{name}"

    def _put_pieces(self, folder: str, pieces: dict[str, torch.Tensor]) -> str:
        """Write this process's rows to a file. Return its path within the run folder."""
        name = f"{folder}/{self._process.rank + 1}-of-{self._process.world_size}.pth"
        with replacing(self._path.parent / name) as file:
            torch.save(pieces, file)
        return name

    def _tidy(self) -> None:
        # This is a collective, because no process may start another save while unused files are removed.
        self._channel.first(super()._tidy)
