"""Images in the row groups of parquet files, and the row groups that a process keeps for the next images."""

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from configs.schema import Data
from datasets.index import FileStamp, Index, changed_during_run, stamps_in
from datasets.shuffle import GroupedShuffle
from datasets.sources.images import EncodedImages
from datasets.sources.parquet.index import opened, read_columns, without_bytes
from datasets.transforms.decode import PixelRules
from utils.errors import DataError

CACHE_BYTES = 192 << 20  # of row groups in each process
WRITING_BYTES = 2 << 30  # of row groups where one process writes all images in another form
MIN_GROUPS = 4  # kept even if they are larger: where one ends an epoch reads from two, with its batches ahead
MAX_DESCRIPTIONS = 128  # of files that a process keeps


class GroupCache:
    """The row groups that were used last. Threads that want the same one at once read it once."""

    def __init__(self):
        self._lock, self._process = threading.Lock(), os.getpid()
        self._groups: OrderedDict[Hashable, tuple[Future, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: Hashable, num_bytes: int, limit: int, read: Callable[[], Any]) -> Any:
        """What `read` returns for this key, which has so many bytes. The oldest are dropped to keep to the limit."""
        if self._process != os.getpid():
            self.__init__()  # after a fork: a thread that is not here may hold the lock, and read for ever
        with self._lock:
            future, _ = self._groups.get(key, (None, 0))
            is_first = future is None
            if is_first:
                future = Future()
                self._groups[key] = future, num_bytes
                self._num_bytes += num_bytes
                while self._num_bytes > limit and len(self._groups) > 1:
                    self._num_bytes -= self._groups.popitem(last=False)[1][1]
            else:
                self._groups.move_to_end(key)
        if is_first:
            try:
                future.set_result(read())
            except BaseException as error:
                self._drop(key)  # the next one tries again
                future.set_exception(error)
        return future.result()

    def _drop(self, key: Hashable) -> None:
        with self._lock:
            self._num_bytes -= self._groups.pop(key, (None, 0))[1]


GROUPS = GroupCache()  # of this process, for all its image sets


class ParquetImages(EncodedImages):
    """The rows of parquet files from `first` on, one for each image."""

    is_read_in_groups = True

    def __init__(self, data: Data, index: Index, rows: range):
        """`rows`: the part of the index that this set has, of whole files."""
        super().__init__(index.column("label")[rows.start : rows.stop], [])
        self.rules, self.first, self.column = PixelRules.of(data), rows.start, index.facts["image"]
        self.files = stamps_in(index.facts["made_of"]["files"])
        self.names = index.text("name")
        self.file_starts = _starts(index.column("file_rows"))
        self.groups = {name: index.column(f"group_{name}") for name in ("file", "number", "bytes")}
        self.group_starts = _starts(index.column("group_rows"))
        self.limit = max(CACHE_BYTES, MIN_GROUPS * self.largest_group)
        self.reach = min(data.SHUFFLE_BUFFER, self._within(self.limit))
        self.has_keys = index.facts["has_keys"]

    @property
    def largest_group(self) -> int:
        """Bytes of the images of the largest row group."""
        return int(self.groups["bytes"].max(initial=0))

    def name(self, index: int) -> str:
        file, row = self._place(index)
        own = self._name(index)
        return f"{file.path}, row {row}" + (f" ({own})" if own else "")

    def key(self, index: int) -> str:
        """The name that travels with the image, or where names are missing or repeated file and row."""
        if self.has_keys:
            return self._name(index)
        file, row = self._place(index)
        return f"{file.path.name}: {row}"

    def split_keys(self) -> Iterable[list[bytes]]:
        is_whole = self.rows is None and len(self) == len(self.names)
        return self.names.chunks() if self.has_keys and is_whole else super().split_keys()

    def stamp(self, index: int) -> str:
        file, row = self._place(index)
        return f"{file.path.name}\0{file.size}\0{file.mtime_ns}\0{row}"

    def _name(self, index: int) -> str:
        return os.fsdecode(self.names[self.first + self.row(index)])

    def _place(self, index: int) -> tuple[FileStamp, int]:
        """The file of an image, and its row there."""
        row = self.first + self.row(index)
        file = int(np.searchsorted(self.file_starts, row, "right")) - 1
        return self.files[file], row - int(self.file_starts[file])

    def open_file(self, index: int) -> tuple[str, bytes]:
        row = self.first + self.row(index)
        group = int(np.searchsorted(self.group_starts, row, "right")) - 1
        file, number = self.files[self.groups["file"][group]], int(self.groups["number"][group])
        images = GROUPS.get(
            (file, number, self.column),
            int(self.groups["bytes"][group]),
            self.limit,
            lambda: _read_group(file, number, self.column),
        )
        data = images[row - int(self.group_starts[group])].as_py()
        if data is None:
            raise DataError(f"{self.name(index)}: {without_bytes(None)}")
        return os.path.splitext(self._name(index))[1], data

    def epoch_order(self, seed: int, epoch: int) -> GroupedShuffle:
        """Shuffled row groups, then images moved by less than `reach` positions, so that each group is read once."""
        return self._order(self.reach, seed, epoch)

    def order_to_write(self, seed: int) -> GroupedShuffle:
        """As that of an epoch, but mixed more widely, since only one process has to keep row groups."""
        self.limit = max(self.limit, WRITING_BYTES)
        return self._order(self._within(self.limit), seed, 0)

    def _order(self, reach: int, seed: int, epoch: int) -> GroupedShuffle:
        starts = np.clip(self.group_starts - self.first, 0, len(self) if self.rows is None else None)
        starts = starts if self.rows is None else np.searchsorted(self.rows, starts)
        return GroupedShuffle(starts, reach, seed, epoch)

    def _within(self, num_bytes: int) -> int:
        """How far an image may move without finding its row group dropped. A quarter is for batches read ahead."""
        mean = max(int(self.groups["bytes"].sum()) // max(int(self.group_starts[-1]), 1), 1)
        return max(num_bytes * 3 // 4 // mean, 1)


def _starts(counts: np.ndarray) -> np.ndarray:
    """int64 [N + 1]: the first row of each, and the number of all."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _read_group(file: FileStamp, number: int, column: str) -> Any:
    """A pyarrow array of the bytes of a row group's images."""
    stat = os.stat(file.path)
    if (stat.st_size, stat.st_mtime_ns) != file[1:]:
        raise changed_during_run(file.path)
    images = read_columns(file.path, [column], number, metadata=_description(file)).column(0)
    images = images.flatten()[0] if "." in column else images
    return images.combine_chunks() if images.num_chunks != 1 else images.chunk(0)


@functools.lru_cache(MAX_DESCRIPTIONS)
def _description(file: FileStamp) -> Any:
    """The footer of a file, which is read once: that of a large file takes milliseconds."""
    with opened(file.path) as content:
        return content.metadata
