"""The index of a data set: what is known of each image, in one file that all processes of a machine map into memory.

The file is MAGIC, the length and checksum of a description, the description in JSON (the columns and the facts), then the
columns of numbers and of byte strings, each with a checksum in the description. A start compares all checksums, which takes
0.1 s for the names of a million images; of more than COMPARED bytes that of the description alone: the others are on the disk
before the file has its name, and a copy that broke off is too short.
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
NUMBERS = ("u1", "<i4", "<u4", "<i8", "<u8")
TEXT = "text"  # the type of a column of byte strings; others are numpy's, such as <i4
SMALL = 4 << 20  # bytes up to which an index stays in memory, about 60,000 images
ALIGNMENT = 64
COMPARED = 2**30  # bytes
NUMBER = 8  # bytes of the length and of the checksum of the description
COPIED_AT_ONCE = 16 << 20
CHUNK = 1 << 16  # rows of a column that are taken into memory at once


class IndexWriteError(Exception):
    """The index cannot be written at its place."""


class BuiltElsewhereError(Exception):
    """Another process has built the index while this one waited for it."""


class MappedColumn(np.ndarray):
    """A column of an index file. A loader process to which it is sent opens the file again."""

    source: tuple[Path, str, str] | None = None  # file, its id, name; of the whole column, not of parts

    def __reduce__(self):
        return (_reopen, self.source) if self.source else super().__reduce__()


class Texts(Sequence):
    """A column of byte strings: `blob[starts[i]:starts[i + 1]]`."""

    def __init__(self, starts: np.ndarray, blob: np.ndarray, checksums: tuple[int, int] | None = None):
        """`starts`: uint64 [N + 1]; `blob`: uint8. `checksums`: of both, as an index file notes them."""
        self.starts, self.blob, self._checksums = starts, blob, checksums

    @classmethod
    def of(cls, values: Sequence[bytes]) -> "Texts":
        starts = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(np.fromiter(map(len, values), np.uint64, len(values)), out=starts[1:])
        return cls(starts, np.frombuffer(b"".join(values), np.uint8))

    def digest(self) -> bytes:
        """Return bytes that differ for other strings. Of an index file they are known, however many strings it has."""
        checksums = self._checksums or (zlib.crc32(self.starts), zlib.crc32(self.blob))
        return b"%d %d %d" % (*checksums, len(self.starts))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> bytes:
        start, stop = self.starts[index : index + 2].tolist()
        return self.blob[start:stop].tobytes()

    def chunk(self, start: int, stop: int) -> list[bytes]:
        """The strings of a range, much faster than one by one."""
        starts = self.starts[start : stop + 1]
        return self._cut(starts[:-1], starts[1:])

    def select(self, rows: np.ndarray) -> list[bytes]:
        """The strings of some rows, which best lie together."""
        return self._cut(self.starts[rows], self.starts[rows.astype(np.int64) + 1])

    def find_file_names(self, names: Collection[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield (row, file name) of the paths whose file name is one of these, without making the strings of all rows."""
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
            # Two strings can have one hash, so the file names themselves decide.
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
        """The strings, `size` at a time."""
        return (self.chunk(start, min(start + size, len(self))) for start in range(0, len(self), size))


def _hash_strings(places: Iterable[np.ndarray]) -> np.ndarray:
    """Return a number below 2**16 for each string. `places`: the bytes of all strings at one place after the other."""
    total = np.uint32(0)
    for values in places:
        total = total * np.uint32(2654435761) + values
    return total >> np.uint32(16)


class Shape(NamedTuple):
    """What an index has, whoever made it."""

    columns: Mapping[str, str]  # the type of each, as for IndexWriter
    even: Sequence[str]  # columns of one length each
    facts: Any  # see is_like


def is_like(value: Any, shape: Any) -> bool:
    """Whether plain values have a shape: a type, [that of each], (of one, of the next), {name: that of its value} or {str: of all}."""
    if isinstance(shape, list | tuple):
        shapes = shape if isinstance(shape, tuple) else shape * len(value) if isinstance(value, list) else ()
        return isinstance(value, list) and len(value) == len(shapes) and all(map(is_like, value, shapes))
    if not isinstance(shape, dict):
        return isinstance(value, shape)
    wanted = dict.fromkeys(value, shape[str]) if str in shape and isinstance(value, dict) else shape
    return isinstance(value, dict) and all(name in value and is_like(value[name], wanted[name]) for name in wanted)


def divides(starts: np.ndarray, length: int) -> bool:
    """Whether these are the starts, and the end, of parts that follow one another up to this length."""
    return len(starts) > 0 == starts[0] and starts[-1] == length and bool((starts[1:] >= starts[:-1]).all())


class Index:
    """A complete index. `facts` are small and in plain values; `id` is another for each one that is written.

    `path` is None when it is in memory only.
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
        """Whether columns and facts are as our own: somebody else may have made it."""
        if not is_like(self.facts, shape.facts):
            return False
        lengths = {name: self._length(name, kind) for name, kind in shape.columns.items()}
        return None not in lengths.values() and all(
            len({lengths[name] for name in group.split()}) == 1 for group in shape.even
        )

    def _length(self, name: str, kind: str) -> int | None:
        """The rows of a column; None if it is not there, or of another type, or strings do not follow one another."""
        column, starts = self._columns.get(name), self._columns.get(f"{name}.starts")
        if column is None or column.dtype != ("u1" if kind == TEXT else kind):
            return None
        if kind != TEXT:
            return len(column)
        return (
            len(starts) - 1 if starts is not None and starts.dtype == "<u8" and divides(starts, len(column)) else None
        )

    def is_below(self, name: str, limit: int) -> bool:
        """Whether all numbers of a column are from 0 to below this limit."""
        column = self.column(name)
        return not len(column) or 0 <= int(column.min()) <= int(column.max()) < limit

    def column(self, name: str) -> np.ndarray:
        """The numbers of a column, read-only."""
        return self._columns[name]

    def text(self, name: str) -> Texts:
        """The byte strings of a column."""
        parts = f"{name}.starts", name
        known = [self._checksums[part] for part in parts if part in self._checksums]
        return Texts(*(self._columns[part] for part in parts), tuple(known) if len(known) == len(parts) else None)


class Place:
    """A place where an index is being built. Nothing is written there before it is known to be too large for memory."""

    def __init__(self, path: Path):
        self.path, self._stack = path, contextlib.ExitStack()
        self._before = index.id if (index := open_index(path)) else None
        self.file: IO[bytes] | None = None  # what becomes the index, locked against other processes

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def claim(self) -> None:
        """Wait until no other process builds here. BuiltElsewhereError: one has done so meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        self.file = self._stack.enter_context(locked(part, wait=lambda: None))
        self._stack.callback(self._remove, part)  # while it is still locked
        if (index := open_index(self.path)) and index.id != self._before:
            raise BuiltElsewhereError

    def finish(self) -> None:
        """Give the file its name, once all of it is on the disk."""
        sync(self.file)
        os.replace(self.file.name, self.path)
        self.file = None
        sync_folder(self.path.parent)

    def _remove(self, part: Path) -> None:
        if self.file is not None:
            part.unlink(missing_ok=True)


class IndexWriter:
    """Collects columns chunk by chunk: in memory up to `small` bytes, then in nameless files beside the index."""

    def __init__(self, place: Place | None, columns: Mapping[str, str], small: int | None = None):
        """`columns`: the type of each, which may differ in length. Without a `place`, all stays in memory."""
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
        """Append to one column."""
        if self._types[name] != TEXT:
            self._write(name, np.ascontiguousarray(values, self._types[name]))
            return
        content = b"".join(values)
        ends = np.cumsum(np.fromiter(map(len, values), np.uint64, len(values)), dtype="<u8")
        self._write(f"{name}.starts", ends + np.uint64(self._ends[name]))
        self._write(name, content)
        self._ends[name] += len(content)

    def finish(self, facts: dict) -> Index:
        """The index, opened; its file, if it needs one, appears at once and whole."""
        if self.in_memory:
            columns = {part: np.frombuffer(file.getvalue(), self._parts[part]) for part, file in self._files.items()}
            return Index(None, columns, facts, checksums=self._checksums)
        with self._as_write_error():
            file = self.place.file
            file.truncate(0)  # what a killed process left
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
        """The numbers of a column so far."""
        file = self._files[part]
        if self.in_memory:
            return np.frombuffer(file.getvalue(), self._parts[part])
        file.flush()
        size = self._sizes[part]
        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        return np.frombuffer(content, self._parts[part])

    def text(self, name: str) -> Texts:
        """The byte strings of a column so far."""
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


def open_index(path: Path, compares: bool = True) -> Index | None:
    """The index in a file; None if there is none, or none that is whole and of this version. `compares`: the columns
    with their checksums."""
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
            if compares and size <= COMPARED and zlib.crc32(memoryview(content)[place : place + num_bytes]) != checksum:
                return None
            kind, checksums[part] = np.dtype(kind), int(checksum)
            columns[part] = MappedColumn((num_bytes // kind.itemsize,), kind, content, place)
            columns[part].source = (path, described["id"], part)
            place += num_bytes + -num_bytes % ALIGNMENT
        return Index(path, columns, described["facts"] | {}, described["id"], checksums) if place == size else None
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):  # also of one made by hand
        return None


def _description(columns: dict[str, list], facts: dict) -> bytes:
    """The description that the file opens with, filled up with spaces so that the columns are aligned."""
    content = json.dumps({"id": secrets.token_hex(8), "columns": columns, "facts": facts}).encode()
    content += b" " * (-(len(MAGIC) + 2 * NUMBER + len(content)) % ALIGNMENT)
    return MAGIC + b"".join(each.to_bytes(NUMBER, "little") for each in (len(content), zlib.crc32(content))) + content


def _reopen(path: Path, identity: str, part: str) -> np.ndarray:
    index = open_index(path, compares=False)
    if index is None or index.id != identity:
        raise changed_during_run(path)
    return index.column(part)


# --- where an index lies ---


def caches_folder(config: Config) -> Path:
    """DATA.CACHE_PATH, or where it is not set `cache` below SAVE."""
    return Path(config.DATA.CACHE_PATH or Path(config.SAVE) / "cache").expanduser()


def index_paths(config: Config, beside: Path) -> list[Path]:
    """The places where an index may lie: `beside` the data, or where that is read-only in the folder of caches.

    A small one is written nowhere, and no folder is made for it.
    """
    known_by = hashlib.sha256(os.fsencode(os.path.realpath(beside))).hexdigest()[:16]
    return [beside, caches_folder(config) / f"{beside.name.removesuffix(ENDING)}-{known_by}{ENDING}"]


def open_or_build(
    paths: Sequence[Path], shape: Shape, is_current: Callable[[Index], bool], build: Callable[[Place | None], Index]
) -> Index:
    """The first current index at one of these places, or one that `build` makes at the first that can be written to.

    `build(place)` makes it with an IndexWriter for that place; None: in memory. In a run rank 0 comes here first
    (Process.after_first), so that the others find what it built.
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


# --- whether it is still that of its files ---


class FileStamp(NamedTuple):
    """Path, size and date of a file: when it was indexed, or now."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | str) -> "FileStamp":
        status = os.stat(file)
        return cls(str(file), status.st_size, status.st_mtime_ns)


def changed_during_run(file: Path | str) -> DataError:
    return DataError(f"{file} was changed during this run; start again, with -resume to continue")


def stamps_of(files: Iterable[Path]) -> list[list]:
    """The FileStamps of files, in the plain values of an index's facts."""
    return [list(FileStamp.of(file)) for file in files]
