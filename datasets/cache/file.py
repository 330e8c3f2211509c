"""The two files of a cache: the images one after the other, and an index that says where each of them lies.

The index opens with MAGIC and a line of JSON, the facts that say what is in the cache. Then comes a block for every
IMAGES_PER_BLOCK images, with a checksum of its own and one of each image. A block is written when its images are on the
disk: after a kill, what no block speaks of is cut off and made again. When all are there, `NAME.index.part` becomes
`NAME.index`.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import re
import sys
import weakref
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.files import sync, sync_folder

MAGIC = b"halfstep cache 2\n"  # the number is that of the form
IMAGES_PER_BLOCK = 256
PIXELS, JPEG, UNREADABLE = range(3)  # what is kept of an image; of an unreadable one the reason
ENTRY = np.dtype(
    [("start", "<u8"), ("length", "<u8")] + [(name, "<u4") for name in ("height", "width", "kind", "checksum")]
)
BLOCK = np.dtype([("entries", ENTRY, (IMAGES_PER_BLOCK,)), ("checksum", "<u4")])  # the last block ends with zeros

# Older versions of Python have no name for it.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class DamagedCache(Exception):
    """A cache is not as it was written; the message says in what."""


class Prepared(NamedTuple):
    """One image as it is kept."""

    kind: int
    height: int
    width: int
    content: bytes | np.ndarray


@dataclass(frozen=True)
class Place:
    """Where a cache lies, and what must be in it."""

    folder: Path
    data_set: str  # of several caches of one data set, all but the newest may go
    facts: dict  # all that the images in it follow from
    num_images: int
    stays: bool  # after the run

    @cached_property
    def header(self) -> bytes:
        facts = {"data_set": self.data_set, "num_images": self.num_images, **self.facts}
        return MAGIC + json.dumps(facts, sort_keys=True).encode() + b"\n"

    @cached_property
    def data_header(self) -> bytes:
        """The data file's own, so that it is not taken for another's."""
        return MAGIC + hashlib.sha256(self.header).digest()

    @property
    def _stem(self) -> str:
        return f"{self.data_set}-{hashlib.sha256(self.header).hexdigest()[:16]}"

    @property
    def data(self) -> Path:
        return self.folder / f"{self._stem}.data"

    @property
    def index(self) -> Path:
        return self.folder / f"{self._stem}.index"

    @property
    def part(self) -> Path:
        """The index of an unfinished cache."""
        return self.folder / f"{self._stem}.index.part"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.data_set}.lock"

    def end_of(self, entries: np.ndarray) -> int:
        """Where the data of these first entries ends."""
        return int(entries[-1]["start"] + entries[-1]["length"]) if len(entries) else len(self.data_header)

    def remove(self) -> None:
        for path in (self.index, self.part, self.data):
            path.unlink(missing_ok=True)

    def remove_older(self) -> list[str]:
        """Remove this data set's other caches, but no file that another run uses or that is not a cache of ours."""
        removed = []
        name = re.compile(re.escape(self.data_set) + r"-[0-9a-f]{16}\.index(\.part)?")
        for index in sorted(self.folder.iterdir()):
            if not name.fullmatch(index.name) or index in (self.index, self.part) or not self._is_ours(index):
                continue
            data = index.with_name(index.name.partition(".")[0] + ".data")
            with contextlib.suppress(BlockingIOError, FileNotFoundError), open(data, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                data.unlink()
                removed.append(data.name)
            if not data.exists():
                index.unlink()
        return removed

    def _is_ours(self, index: Path) -> bool:
        with open(index, "rb") as file:
            magic, facts = file.readline(), file.readline()
        try:
            return magic.startswith(b"halfstep cache ") and json.loads(facts)["data_set"] == self.data_set
        except (ValueError, KeyError, TypeError):
            return False


def read_index(path: Path, place: Place) -> tuple[np.ndarray, bool]:
    """The entries of all blocks up to the first that is not right, and whether that is the whole file."""
    content = path.read_bytes()
    if not content.startswith(place.header):
        return np.empty(0, ENTRY), False
    body = memoryview(content)[len(place.header) :]
    blocks = np.frombuffer(body[: len(body) // BLOCK.itemsize * BLOCK.itemsize], BLOCK)
    is_right = [zlib.crc32(block["entries"].tobytes()) == block["checksum"] for block in blocks]
    num_right = is_right.index(False) if False in is_right else len(blocks)
    entries = blocks["entries"][:num_right].reshape(-1)[: place.num_images]
    return entries, num_right * BLOCK.itemsize == len(body)


class CacheFile:
    """A finished cache, mapped into memory: all processes of a machine share its pages."""

    def __init__(self, place: Place):
        """FileNotFoundError when there is none, DamagedCache when it is not as it was written."""
        self.place = place
        self.entries, is_whole = read_index(place.index, place)
        if not is_whole or len(self.entries) != place.num_images:
            raise DamagedCache(f"{place.index} is not as it was written")
        # While it is open the file is locked, shared, so that nobody takes it for an old one and removes it.
        self._file = open(place.data, "rb")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_SH)
        size, wanted = os.fstat(self._file.fileno()).st_size, place.end_of(self.entries)
        if size != wanted:
            raise DamagedCache(f"{place.data} has {size:,} bytes, not {wanted:,}")
        if self._file.read(len(place.data_header)) != place.data_header:
            raise DamagedCache(f"{place.data} does not belong to its index")
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(f"{place.data} was removed")
        # Private and writable, or torch warns of every array; nothing writes to it. Without MAP_NORESERVE Linux refuses
        # a private map that is larger than the memory.
        flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        self.data = np.frombuffer(mmap.mmap(self._file.fileno(), size, flags=flags, prot=access), np.uint8)
        self._is_right = np.zeros(place.num_images, bool)
        if not place.stays:
            weakref.finalize(self, _remove_after_last, place, self._file, os.getpid())  # at exit, if not before

    def read(self, number: int) -> Prepared:
        """One image. DamagedCache when its bytes are not those that were written.

        They are compared once in each process, when they are read first: to look at all of them at the start would take
        as long as to read the file, of hundreds of GB perhaps.
        """
        start, length, height, width, kind, checksum = self.entries[number].tolist()
        content = self.data[start : start + length]
        if not self._is_right[number]:
            if zlib.crc32(content) != checksum:
                raise DamagedCache(
                    f"its bytes in {self.place.data} are not those that were written; remove that file, and the next start "
                    "makes it anew"
                )
            self._is_right[number] = True
        return Prepared(kind, height, width, content)

    def __reduce__(self):
        return CacheFile, (self.place,)


def _remove_after_last(place: Place, file, pid: int) -> None:
    """Remove a cache unless another process uses it. A forked worker shares its parent's lock, and must not."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            place.remove()


def committed(place: Place) -> tuple[int, int]:
    """How many images of an unfinished cache are there, whole blocks of them, and where their data ends."""
    nothing = 0, len(place.data_header)
    try:
        entries, _ = read_index(place.part, place)
        with open(place.data, "rb") as data:
            is_its_own = data.read(len(place.data_header)) == place.data_header
            size = os.fstat(data.fileno()).st_size
    except FileNotFoundError:
        return nothing
    num_done = len(entries) // IMAGES_PER_BLOCK * IMAGES_PER_BLOCK
    end = place.end_of(entries[:num_done])
    return (num_done, end) if is_its_own and end <= size else nothing


class CacheWriter:
    """A cache that grows, from where an earlier start left it. To be used under `place.lock`."""

    def __init__(self, place: Place):
        self.place = place
        self.num_done, self.end = committed(place)
        if not self.num_done:
            place.remove()  # rather than overwrite: another run may have a damaged one mapped
        mode = "r+b" if self.num_done else "w+b"
        self._data, self._index = open(place.data, mode), open(place.part, mode)  # noqa: SIM115
        if not self.num_done:
            self._data.write(place.data_header)
            self._index.write(place.header)
        self._data.truncate(self.end)
        self._data.seek(self.end)
        num_blocks = self.num_done // IMAGES_PER_BLOCK
        self._index.seek(len(place.header) + num_blocks * BLOCK.itemsize)
        self._index.truncate()
        self._waiting: list[tuple] = []  # entries of images that may not be on the disk yet

    def add(self, image: Prepared) -> None:
        """The next image."""
        length = self._data.write(image.content)
        checksum = zlib.crc32(image.content)
        self._waiting.append((self.end, length, image.height, image.width, image.kind, checksum))
        self.end += length
        self.num_done += 1
        if len(self._waiting) == IMAGES_PER_BLOCK or self.num_done == self.place.num_images:
            self._commit()

    def _commit(self) -> None:
        sync(self._data)
        block = np.zeros((), BLOCK)
        block["entries"][: len(self._waiting)] = np.array(self._waiting, ENTRY)
        block["checksum"] = zlib.crc32(block["entries"].tobytes())
        self._index.write(block.tobytes())
        self._index.flush()
        self._waiting = []

    def finish(self) -> None:
        """All images are there: from here on it is a cache."""
        sync(self._index)
        os.replace(self.place.part, self.place.index)
        sync_folder(self.place.folder)

    def close(self) -> None:
        for file in (self._data, self._index):
            with contextlib.suppress(OSError):  # a full disk, which was told before
                file.close()
