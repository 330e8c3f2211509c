"""The index of a data set: the facts about each image, in one file that all processes of a machine map into memory.

The file contains MAGIC, the length and checksum of a description, the description in JSON (columns and facts), then
the columns of numbers and of byte strings, each with a checksum in the description. Each start verifies all checksums
of a file of up to COMPARED bytes, which takes 0.1 s for the names of a million images. In a larger file, only the
checksum of the description is verified. The columns of such a file are on the disk before it gets its name, and an
incomplete copy is recognized by its length.
"""

import contextlib
import hashlib
import io
import json
import mmap
import os
import secrets
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np

from configs.schema import Config
from utils.errors import DataError, cause_of
from utils.files import locked, sync, sync_folder, without_waiting

ENDING = ".index"
MAGIC = b"halfstep index 3\n"  # the number is the version of the format
NUMBERS = ("u1", "<i4", "<u4", "<i8", "<u8")  # the allowed types in a file
TEXT = "text"  # the type of a column of byte strings; other types are numpy's, such as <i4
SMALL = 4 << 20  # bytes of the largest index that is kept only in memory (about 60,000 images)
ALIGNMENT = 64  # each column starts at a multiple of this number of bytes
COMPARED = 2**30  # maximum size in bytes of a file whose columns are compared with their checksums
NUMBER = 8  # bytes of each number before the description: its length and its checksum
COPIED_AT_ONCE = 16 << 20  # bytes
CHUNK = 1 << 16  # rows of a column that are loaded into memory at once


class IndexWriteError(Exception):
    """An error for an index that cannot be written to its path."""


class BuiltElsewhereError(Exception):
    """An error for an index that another process built while this process waited for it."""


class MappedColumn(np.ndarray):
    """A column of an index file. A loader process that receives it opens the file again."""

    source: tuple[Path, str, str] | None = None  # file, its id, and name of the column; None for a slice

    def __reduce__(self):
        return (_reopen, self.source) if self.source else super().__reduce__()


class Texts(Sequence):
    """A column of byte strings. String i is `blob[starts[i]:starts[i + 1]]`."""

    def __init__(self, starts: np.ndarray, blob: np.ndarray, checksums: tuple[int, int] | None = None):
        """`starts`: uint64 [N + 1]; `blob`: uint8. `checksums`: the index file's checksums of `starts` and `blob`."""
        self.starts, self.blob, self._checksums = starts, blob, checksums

    @classmethod
    def of(cls, values: Sequence[bytes]) -> "Texts":
        starts = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(np.fromiter(map(len, values), np.uint64, len(values)), out=starts[1:])
        return cls(starts, np.frombuffer(b"".join(values), np.uint8))

    def digest(self) -> bytes:
        """Return bytes that identify these strings. If the checksums are known, the strings are not read."""
        checksums = self._checksums or (zlib.crc32(self.starts), zlib.crc32(self.blob))
        return b"%d %d %d" % (*checksums, len(self.starts))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> bytes:
        start, stop = self.starts[index : index + 2].tolist()
        return self.blob[start:stop].tobytes()

    def chunk(self, start: int, stop: int) -> list[bytes]:
        """Return the strings of a range of rows. This is much faster than getting them one by one."""
        starts = self.starts[start : stop + 1]
        return self._cut(starts[:-1], starts[1:])

    def select(self, rows: np.ndarray) -> list[bytes]:
        """Return the strings of some rows. This is fastest for rows that are close together."""
        return self._cut(self.starts[rows], self.starts[rows.astype(np.int64) + 1])

    def find_file_names(self, names: Collection[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield (row, file name) for each path with one of these file names.

        Only paths whose last bytes have the same hash as the last bytes of a name are compared in full.
        """
        length = min(16, *map(len, names))
        tails = np.frombuffer(b"".join(name[-length:] for name in names), np.uint8).reshape(-1, length)
        wanted = np.zeros(1 << 16, bool)
        wanted[_hash_strings(tails.T)] = True
        for first in range(0, len(self), CHUNK):
            starts = self.starts[first : first + CHUNK + 1].astype(np.int64)
            rows = first + np.flatnonzero(np.diff(starts) >= length)
            ends = self.starts[rows + 1].astype(np.int64)
            is_candidate = wanted[_hash_strings(self.blob[ends - place] for place in range(length, 0, -1))]
            rows = rows[is_candidate]
            # Two strings can have the same hash, so the file names themselves decide.
            for row, path in zip(rows.tolist(), self.select(rows), strict=True):
                name = path[path.rfind(b"/") + 1 :]
                if name in names:
                    yield row, name

    def _cut(self, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
        if not len(starts):
            return []
        first, end = int(starts.min()), int(ends.max())
        content = self.blob[first:end].tobytes() if end - first <= COPIED_AT_ONCE else memoryview(self.blob)[first:end]
        places = zip((starts - np.uint64(first)).tolist(), (ends - np.uint64(first)).tolist(), strict=True)
        return [bytes(content[start:stop]) for start, stop in places]

    def chunks(self, size: int = CHUNK) -> Iterator[list[bytes]]:
        """Return an iterator over the strings, `size` at a time."""
        return (self.chunk(start, min(start + size, len(self))) for start in range(0, len(self), size))


def _hash_strings(places: Iterable[np.ndarray]) -> np.ndarray:
    """Return a hash below 2**16 for each string. `places`: for each position, the bytes of all strings there."""
    total = np.uint32(0)
    for values in places:
        total = total * np.uint32(2654435761) + values
    return total >> np.uint32(16)


class Shape(NamedTuple):
    """The columns and facts that an index must have."""

    columns: Mapping[str, str]  # the type of each column, as for IndexWriter
    even: Sequence[str]  # names of columns with equal lengths, such as "path target"
    facts: Any  # the shape of the facts; see is_like


def is_like(value: Any, shape: Any) -> bool:
    """Return whether a value has this shape.

    A shape is a type, [shape of all items], (shapes of the items), {key: shape} or {str: shape of all values}.
    """
    if isinstance(shape, list | tuple):
        shapes = shape if isinstance(shape, tuple) else shape * len(value) if isinstance(value, list) else ()
        return isinstance(value, list) and len(value) == len(shapes) and all(map(is_like, value, shapes))
    if not isinstance(shape, dict):
        return isinstance(value, shape)
    wanted = dict.fromkeys(value, shape[str]) if str in shape and isinstance(value, dict) else shape
    return isinstance(value, dict) and all(name in value and is_like(value[name], wanted[name]) for name in wanted)


def divides(starts: np.ndarray, length: int) -> bool:
    """Return whether these are the edges of consecutive parts, from 0 to this length."""
    return len(starts) > 0 == starts[0] and starts[-1] == length and bool((starts[1:] >= starts[:-1]).all())


class Index:
    """A complete index. `facts` are a few plain values. Every index file that is written gets its own `id`.

    `path` is None if the index is only in memory.
    """

    def __init__(
        self,
        path: Path | None,
        columns: dict[str, np.ndarray],
        facts: dict,
        identity: str = "",
        checksums: Mapping[str, int] = MappingProxyType({}),
    ):
        self.path, self.facts, self.id, self._columns, self._checksums = path, facts, identity, columns, checksums

    def has(self, shape: "Shape") -> bool:
        """Return whether the columns and facts have this shape. A file from another program may have another shape."""
        if not is_like(self.facts, shape.facts):
            return False
        lengths = {name: self._length(name, kind) for name, kind in shape.columns.items()}
        return None not in lengths.values() and all(
            len({lengths[name] for name in group.split()}) == 1 for group in shape.even
        )

    def _length(self, name: str, kind: str) -> int | None:
        """Return the number of rows of a column, or None if it is missing or damaged, or has another type."""
        column, starts = self._columns.get(name), self._columns.get(f"{name}.starts")
        if column is None or column.dtype != ("u1" if kind == TEXT else kind):
            return None
        if kind != TEXT:
            return len(column)
        return (
            len(starts) - 1 if starts is not None and starts.dtype == "<u8" and divides(starts, len(column)) else None
        )

    def is_below(self, name: str, limit: int) -> bool:
        """Return whether all numbers of a column are at least 0 and below this limit."""
        column = self.column(name)
        return not len(column) or 0 <= int(column.min()) <= int(column.max()) < limit

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of a column, read-only."""
        return self._columns[name]

    def text(self, name: str) -> Texts:
        """Return the byte strings of a column."""
        parts = f"{name}.starts", name
        known = [self._checksums[part] for part in parts if part in self._checksums]
        return Texts(*(self._columns[part] for part in parts), tuple(known) if len(known) == len(parts) else None)


class Place:
    """A path at which an index is being built. Nothing is written there while the index is small."""

    def __init__(self, path: Path):
        self.path, self._stack = path, contextlib.ExitStack()
        self._before = index.id if (index := open_index(path)) else None
        self.file: IO[bytes] | None = None  # the file that becomes the index, locked against other processes

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def claim(self) -> None:
        """Wait until no other process builds here. Raise BuiltElsewhereError if another process has built the index."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        self.file = self._stack.enter_context(locked(part, wait=lambda: None))
        self._stack.callback(self._remove, part)  # runs while the file is still locked
        if (index := open_index(self.path)) and index.id != self._before:
            raise BuiltElsewhereError

    def finish(self) -> None:
        """Write the whole file to the disk, and then rename it to its final name."""
        sync(self.file)
        os.replace(self.file.name, self.path)
        self.file = None
        sync_folder(self.path.parent)

    def _remove(self, part: Path) -> None:
        if self.file is not None:
            part.unlink(missing_ok=True)


class IndexWriter:
    """Collects columns chunk by chunk: in memory up to `small` bytes, then in unnamed files next to the index."""

    def __init__(self, place: Place | None, columns: Mapping[str, str], small: int | None = None):
        """`columns`: the type of each column. Their lengths may differ. Without a `place`, all data stays in memory."""
        self.place, self._types, self._small = place, dict(columns), SMALL if small is None else small
        self._parts = {name: "u1" if kind == TEXT else kind for name, kind in columns.items()}
        self._ends = {name: 0 for name, kind in columns.items() if kind == TEXT}
        self._parts |= {f"{name}.starts": "<u8" for name in self._ends}
        self._files: dict[str, IO[bytes]] = {part: io.BytesIO() for part in self._parts}
        self._sizes, self._checksums = (dict.fromkeys(self._parts, 0) for _ in range(2))
        self.in_memory = True
        for name in self._ends:
            self._write(f"{name}.starts", np.zeros(1, "<u8"))

    def add(self, name: str, values: Sequence[bytes] | np.ndarray) -> None:
        """Append values to one column."""
        if self._types[name] != TEXT:
            self._write(name, np.ascontiguousarray(values, self._types[name]))
            return
        content = b"".join(values)
        ends = np.cumsum(np.fromiter(map(len, values), np.uint64, len(values)), dtype="<u8")
        self._write(f"{name}.starts", ends + np.uint64(self._ends[name]))
        self._write(name, content)
        self._ends[name] += len(content)

    def finish(self, facts: dict) -> Index:
        """Complete the index and return it. If the index needs a file, the file appears atomically."""
        if self.in_memory:
            columns = {part: np.frombuffer(file.getvalue(), self._parts[part]) for part, file in self._files.items()}
            return Index(None, columns, facts, checksums=self._checksums)
        with self._as_write_error():
            file = self.place.file
            file.truncate(0)  # a killed process may have left content
            columns = {part: [self._parts[part], self._sizes[part], self._checksums[part]] for part in self._parts}
            file.write(_description(columns, facts))
            for part, content in self._files.items():
                content.seek(0)
                while chunk := content.read(COPIED_AT_ONCE):
                    file.write(chunk)
                content.close()
                file.write(bytes(-self._sizes[part] % ALIGNMENT))
            self.place.finish()
        index = open_index(self.place.path)
        if index is None:
            raise IndexWriteError(f"{self.place.path} cannot be read back")
        return index

    def column(self, part: str) -> np.ndarray:
        """Return the numbers that a column has so far."""
        file = self._files[part]
        if self.in_memory:
            return np.frombuffer(file.getvalue(), self._parts[part])
        file.flush()
        size = self._sizes[part]
        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        return np.frombuffer(content, self._parts[part])

    def text(self, name: str) -> Texts:
        """Return the byte strings that a column has so far."""
        return Texts(self.column(f"{name}.starts"), self.column(name))

    def _write(self, part: str, content: bytes | np.ndarray) -> None:
        with self._as_write_error():
            self._files[part].write(content)
            self._sizes[part] += memoryview(content).nbytes
            self._checksums[part] = zlib.crc32(content, self._checksums[part])
            if self.in_memory and self.place and sum(self._sizes.values()) > self._small:
                self._move_to_files()

    def _move_to_files(self) -> None:
        self.place.claim()
        for part, content in self._files.items():
            self._files[part] = tempfile.TemporaryFile(dir=self.place.path.parent, buffering=1 << 20)  # noqa: SIM115
            self._files[part].write(content.getbuffer())
        self.in_memory = False

    @contextlib.contextmanager
    def _as_write_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise IndexWriteError(f"{self.place and self.place.path}: {cause_of(error)}") from error


def open_index(path: Path, verify: bool = True) -> Index | None:
    """Return the index in a file, or None if it is missing, damaged or of another version. `verify`: also
    compare the columns with their checksums."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            size, magic = os.fstat(file.fileno()).st_size, file.read(len(MAGIC))
            length, checksum = (int.from_bytes(file.read(NUMBER), "little") for _ in range(2))
            description = file.read(length) if magic == MAGIC and length <= size else b""
            if not description or zlib.crc32(description) != checksum:
                return None
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        described, columns, checksums = json.loads(description), {}, {}
        place = len(MAGIC) + 2 * NUMBER + length
        for part, (kind, num_bytes, checksum) in described["columns"].items():
            if not 0 <= num_bytes <= size - place or kind not in NUMBERS:
                return None
            if verify and size <= COMPARED and zlib.crc32(memoryview(content)[place : place + num_bytes]) != checksum:
                return None
            kind, checksums[part] = np.dtype(kind), int(checksum)
            columns[part] = MappedColumn((num_bytes // kind.itemsize,), kind, content, place)
            columns[part].source = (path, described["id"], part)
            place += num_bytes + -num_bytes % ALIGNMENT
        return Index(path, columns, described["facts"] | {}, described["id"], checksums) if place == size else None
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):  # the file may be damaged
        return None


def _description(columns: dict[str, list], facts: dict) -> bytes:
    """Return the header of the file. It has the description, padded with spaces so that the columns are aligned."""
    content = json.dumps({"id": secrets.token_hex(8), "columns": columns, "facts": facts}).encode()
    content += b" " * (-(len(MAGIC) + 2 * NUMBER + len(content)) % ALIGNMENT)
    return MAGIC + b"".join(each.to_bytes(NUMBER, "little") for each in (len(content), zlib.crc32(content))) + content


def _reopen(path: Path, identity: str, part: str) -> np.ndarray:
    index = open_index(path, verify=False)
    if index is None or index.id != identity:
        raise changed_during_run(path)
    return index.column(part)


# --- the location of an index ---


def caches_folder(config: Config) -> Path:
    """Return DATA.CACHE_PATH, or the folder `cache` in SAVE if DATA.CACHE_PATH is not set."""
    return Path(config.DATA.CACHE_PATH or Path(config.SAVE) / "cache").expanduser()


def index_paths(config: Config, beside: Path) -> list[Path]:
    """Return the possible paths of an index: `beside`, which is next to the data, then a path in the cache folder.

    The cache folder is for read-only data. It is not created for a small index, which is not written.
    """
    known_by = hashlib.sha256(os.fsencode(os.path.realpath(beside))).hexdigest()[:16]
    return [beside, caches_folder(config) / f"{beside.name.removesuffix(ENDING)}-{known_by}{ENDING}"]


def open_or_build(
    paths: Sequence[Path], shape: Shape, is_current: Callable[[Index], bool], build: Callable[[Place | None], Index]
) -> Index:
    """Return the first current index at these paths, or build one at the first path that can be written.

    `build(place)` writes the index with an IndexWriter for that place, or in memory if `place` is None. In a run, rank
    0 calls this first (Process.after_first), so that the other ranks find its index.
    """
    while True:
        for path in paths:
            if (index := open_index(path)) and index.has(shape) and is_current(index):
                return index
        with contextlib.suppress(BuiltElsewhereError):
            for path in paths:
                with contextlib.suppress(IndexWriteError), Place(path) as place:
                    return build(place)
            return build(None)


# --- whether the indexed files have changed ---


class FileStamp(NamedTuple):
    """Path, size and date of a file, either now or when it was indexed."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | str) -> "FileStamp":
        status = os.stat(file)
        return cls(str(file), status.st_size, status.st_mtime_ns)


def changed_during_run(file: Path | str) -> DataError:
    return DataError(f"{file} was changed during this run; start again (-resume continues the run)")


def stamps_of(files: Iterable[Path]) -> list[list]:
    """Return the FileStamps of files as plain values, for the facts of an index."""
    return [list(FileStamp.of(file)) for file in files]
