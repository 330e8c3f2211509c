"""The index of a data set: the facts about each image, in one file that all processes of a machine map into memory.

The file has the format of safetensors, which other programs can read: the columns, and plain facts in JSON. Byte
strings are two columns: all strings together, and the place where each of them starts. An index is read again only if
its checksums are right. Comparing them takes 0.1 s for a million images.
"""

import hashlib
import io
import json
import mmap
import os
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import Config
from utils.errors import DataError
from utils.files import locked, sync, sync_folder, without_waiting

ENDING = ".index"
FORMAT = "halfstep index 4"  # the number is the version of the format
TYPES = {
    "U8": "u1",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
}  # safetensors' names for numpy's types
TEXT = "text"  # the type of a column of byte strings; other types are numpy's, such as <i4
SMALL = 4 << 20  # bytes of the largest index that is kept only in memory (about 60,000 images)
COPIED_AT_ONCE = 16 << 20  # bytes
CHUNK = 1 << 16  # rows of a column that are loaded into memory at once


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

    def _cut(self, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
        if not len(starts):
            return []
        first, end = int(starts.min()), int(ends.max())
        content = self.blob[first:end].tobytes() if end - first <= COPIED_AT_ONCE else memoryview(self.blob)[first:end]
        places = zip((starts - np.uint64(first)).tolist(), (ends - np.uint64(first)).tolist(), strict=True)
        return [bytes(content[start:stop]) for start, stop in places]

    def in_chunks(self, rows: np.ndarray | None) -> Iterator[list[bytes]]:
        """Return an iterator over the strings of these rows, or of all, CHUNK at a time."""
        if rows is None:
            return self.chunks()
        return (self.select(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK))

    def chunks(self) -> Iterator[list[bytes]]:
        """Return an iterator over the strings, CHUNK at a time."""
        return (self.chunk(start, min(start + CHUNK, len(self))) for start in range(0, len(self), CHUNK))


class Index:
    """A complete index. `facts` are a few plain values. Equal indexes have the same `id`.

    `path` is None if the index is only in memory.
    """

    def __init__(self, columns: Mapping[str, np.ndarray], checksums: Mapping[str, int], facts: dict):
        self.path: Path | None = None
        self.facts, self._columns, self._checksums = facts, columns, checksums
        described = [[part, column.dtype.str, len(column), checksums[part]] for part, column in columns.items()]
        self.id = hashlib.sha256(json.dumps([FORMAT, described, facts]).encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of a column, read-only."""
        return self._columns[name]

    def rows(self, name: str, count: int) -> np.ndarray:
        """Return the numbers of a column as an array [count, numbers in a row]."""
        column = self._columns[name]
        return column.reshape(count, len(column) // max(count, 1))

    def text(self, name: str) -> Texts:
        """Return the byte strings of a column."""
        parts = f"{name}.starts", name
        return Texts(*(self._columns[part] for part in parts), tuple(self._checksums[part] for part in parts))

    def save(self, path: Path) -> None:
        """Write the index to a file. Raise OSError if it cannot be written."""
        facts = {"format": FORMAT, "id": self.id, "facts": json.dumps(self.facts)}
        header: dict[str, dict] = {"__metadata__": facts | {"checksums": json.dumps(self._checksums)}}
        names, end = {kind: name for name, kind in TYPES.items()}, 0
        # The columns of the widest numbers come first, so that each number is aligned.
        columns = dict(sorted(self._columns.items(), key=lambda item: -item[1].itemsize))
        for part, column in columns.items():
            kind = names[column.dtype.str.replace("|", "")]
            header[part] = {"dtype": kind, "shape": [len(column)], "data_offsets": [end, end + column.nbytes]}
            end += column.nbytes
        content = json.dumps(header).encode()
        content += b" " * (-len(content) % 8)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.part"), wait=lambda: None) as file:
            file.truncate(0)  # a killed process may have left content
            file.write(len(content).to_bytes(8, "little") + content)
            for column in columns.values():
                file.write(column)
            sync(file)
            os.replace(file.name, path)
        sync_folder(path.parent)
        self.path = path


class IndexBuilder:
    """Collects the columns of an index in memory, chunk by chunk."""

    def __init__(self, columns: Mapping[str, str]):
        """`columns`: the type of each column. Their lengths may differ."""
        self._types = dict(columns)
        self._parts = {name: "u1" if kind == TEXT else kind for name, kind in columns.items()}
        self._ends = {name: 0 for name, kind in columns.items() if kind == TEXT}
        self._parts |= {f"{name}.starts": "<u8" for name in self._ends}
        self._contents = {part: io.BytesIO() for part in self._parts}
        for name in self._ends:
            self._contents[f"{name}.starts"].write(bytes(8))

    def add(self, name: str, values: Sequence[bytes] | np.ndarray) -> None:
        """Append values to one column."""
        if self._types[name] != TEXT:
            self._contents[name].write(np.ascontiguousarray(values, self._types[name]))
            return
        content = b"".join(values)
        ends = np.cumsum(np.fromiter(map(len, values), np.uint64, len(values)), dtype="<u8")
        self._contents[f"{name}.starts"].write(ends + np.uint64(self._ends[name]))
        self._contents[name].write(content)
        self._ends[name] += len(content)

    def column(self, part: str) -> np.ndarray:
        """Return the numbers that a column has so far. No more can be added to it while they are in use."""
        return np.frombuffer(self._contents[part].getbuffer(), self._parts[part])

    def text(self, name: str) -> Texts:
        """Return the byte strings that a column has so far."""
        return Texts(self.column(f"{name}.starts"), self.column(name))

    def finish(self, facts: dict) -> Index:
        columns = {part: self.column(part) for part in self._parts}
        facts = json.loads(json.dumps(facts))  # tuples become lists, as in an index that is read from a file
        return Index(columns, {part: zlib.crc32(column) for part, column in columns.items()}, facts)


def open_index(path: Path) -> Index | None:
    """Return the index in a file, or None if it is missing, damaged or of another version."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length if length < size else 0))
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata, columns, end = header.pop("__metadata__"), {}, 8 + length
        for part, described in header.items():
            kind, (start, stop) = TYPES[described["dtype"]], described["data_offsets"]
            columns[part] = np.frombuffer(content, kind, described["shape"][0], 8 + length + start)
            end = max(end, 8 + length + stop)
        checksums = json.loads(metadata["checksums"])
        index = Index({part: columns[part] for part in checksums}, checksums, json.loads(metadata["facts"]))
        is_whole = end == size and (metadata["format"], metadata["id"]) == (FORMAT, index.id)
        if is_whole and all(zlib.crc32(columns[part]) == checksums[part] for part in columns):
            index.path = path
            return index
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):  # the file may be damaged
        pass
    return None


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
    paths: Sequence[Path],
    columns: Mapping[str, str],
    made_of: dict,
    build: Callable[[IndexBuilder], dict],
    is_current: Callable[[Index], bool] = lambda index: True,
    keep_small: bool = False,
) -> Index:
    """Return the index of these data at one of the paths, or build it and write it to the first path that is writable.

    An index belongs to the data if its fact `made_of` is equal and `is_current` is true. `build` adds the `columns` and
    returns further facts. A small index is not written unless `keep_small`: reading the data again is as fast. In a
    run, rank 0 calls this first (Process.after_first), so that the other ranks find its index.
    """
    made_of = json.loads(json.dumps(made_of))
    for path in paths:
        if (index := open_index(path)) and index.facts.get("made_of") == made_of and is_current(index):
            return index
    builder = IndexBuilder(columns)
    facts = build(builder)
    index = builder.finish({"made_of": made_of, **facts})
    if keep_small or index.num_bytes > SMALL:
        for path in paths:
            try:
                index.save(path)
            except OSError:  # read-only data, or a full disk
                continue
            return open_index(path) or index  # mapped, so that all processes share its memory
    return index


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


# --- strings on their way into an index ---


def encoded(values: list[str]) -> list[bytes]:
    """Encode strings as os.fsencode does, but all at once, because that is much faster."""
    together = os.fsencode("\n".join(values)).split(b"\n")
    return together if len(together) == len(values) else [os.fsencode(value) for value in values]


class Distinct:
    """Distinct strings, such as classes or folders, in order of first occurrence, each with its first line."""

    def __init__(self):
        self.numbers: dict[str, int] = {}
        self.lines = array("Q")

    def add(self, values: Sequence[str], lines: np.ndarray) -> np.ndarray:
        """Add the values of the next rows. Return the number of each value as uint32."""
        numbers, before = self.numbers, len(self.numbers)
        numbers_of_rows = np.fromiter(
            (numbers.setdefault(each, len(numbers)) for each in values), np.uint32, len(values)
        )
        if len(numbers) > before:
            new, places = np.unique(numbers_of_rows, return_index=True)
            self.lines.extend(lines[places[new >= before]].tolist())
        return numbers_of_rows


class RowHashes:
    """The 64-bit hashes of strings, to find equal strings without keeping them in memory."""

    def __init__(self):
        self._all = array("q")  # grows in place; many small arrays would fragment the memory

    def add(self, values: Sequence[str] | Sequence[bytes]) -> None:
        # Python's own hash differs between processes, which does not matter here.
        self._all.frombytes(np.fromiter(map(hash, values), np.int64, len(values)).tobytes())

    def take(self) -> np.ndarray:
        """Return all hashes, and remove them from this object."""
        hashes, self._all = self._all, array("q")
        return np.frombuffer(hashes, np.int64)


def equal_rows(hashes: np.ndarray, text: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """Yield the rows of each string that occurs more than once, in order. `text(row)` returns the string of a row."""
    in_order = np.sort(hashes)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    del in_order
    if not len(repeated):
        return
    places = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
    rows = np.flatnonzero(repeated[places] == hashes)
    rows = rows[np.argsort(hashes[rows], kind="stable")]
    for group in np.split(rows, np.flatnonzero(np.diff(hashes[rows])) + 1):
        by_text: dict[Hashable, list[int]] = {}
        for row in group.tolist():
            by_text.setdefault(text(row), []).append(row)
        yield from (each for each in by_text.values() if len(each) > 1)
