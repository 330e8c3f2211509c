"""The two files of a cache: the images one after the other, and an index with an entry for each of them.

Both open with MAGIC and a line of JSON, the key that the content depends on. The index ends with a checksum. Entries
are written once their images are on the disk: after a kill, data without an entry is cut off and written again. With the
last image, `NAME.index.part` becomes `NAME.index`.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import mmap
import os
import sys
import weakref
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from utils.files import sync, sync_folder

MAGIC = b"halfstep cache 3\n"  # the number is the version of the format
IMAGES_PER_COMMIT = 256
PIXELS, JPEG, UNREADABLE = range(3)  # what is stored of an image; of an unreadable one, the reason
ENTRY = np.dtype(
    [("start", "<u8"), ("length", "<u8")] + [(name, "<u4") for name in ("height", "width", "kind", "checksum")]
)
CHECKSUM_SIZE = 4  # bytes at the end of an index

# Older versions of Python have no name for it.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class DamagedCacheError(Exception):
    """A cache differs from what was written; the message names the file."""


class StoredImage(NamedTuple):
    """One image as the cache stores it."""

    kind: int
    height: int
    width: int
    content: bytes | np.ndarray


@dataclass(frozen=True)
class CacheLocation:
    """The files of a cache, and the key that its content must have."""

    folder: Path
    data_set: str  # only the newest cache of a data set is kept
    key: dict  # everything that the stored images depend on
    num_images: int
    persistent: bool  # on a disk; otherwise removed with the last process that uses it

    @cached_property
    def header(self) -> bytes:
        content = {"data_set": self.data_set, "num_images": self.num_images, **self.key}
        return MAGIC + json.dumps(content, sort_keys=True).encode() + b"\n"

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.data_set}-{hashlib.sha256(self.header).hexdigest()[:16]}.{ending}"

    @property
    def data(self) -> Path:
        return self._path("data")

    @property
    def index(self) -> Path:
        return self._path("index")

    @property
    def partial_index(self) -> Path:
        return self._path("index.part")

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.data_set}.lock"

    def remove(self) -> None:
        for path in (self.index, self.partial_index, self.data):
            path.unlink(missing_ok=True)

    def remove_older(self) -> list[str]:
        """Remove other caches of this data set, but no file that another run uses or that we did not write."""
        removed = []
        for index in sorted(self.folder.glob(f"{glob.escape(self.data_set)}-*.index*")):
            if index in (self.index, self.partial_index) or not self._is_ours(index):
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
            magic, content = file.readline(), file.readline()
        try:
            return magic.startswith(b"halfstep cache ") and json.loads(content)["data_set"] == self.data_set
        except (ValueError, KeyError, TypeError):
            return False


def read_index(path: Path, header: bytes) -> tuple[np.ndarray, bool]:
    """The entries of an index, and whether it ends with the right checksum, as a complete one does."""
    content = path.read_bytes()
    body = content[len(header) :] if content.startswith(header) else b""
    entries = np.frombuffer(body, ENTRY, len(body) // ENTRY.itemsize)
    return entries, body[-CHECKSUM_SIZE:] == checksum_of(content[:-CHECKSUM_SIZE])


def checksum_of(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM_SIZE, "little")


class CacheFile:
    """A complete cache, mapped into memory: all processes of a machine share its pages."""

    def __init__(self, location: CacheLocation):
        """FileNotFoundError when there is none, DamagedCacheError when it differs from what was written."""
        self.location = location
        self.entries, is_complete = read_index(location.index, location.header)
        if not is_complete or len(self.entries) != location.num_images:
            raise DamagedCacheError(f"{location.index} is damaged")
        # A shared lock for as long as it is open, so that no other process removes it as an old cache.
        self.locked_file = open(location.data, "rb")  # noqa: SIM115
        fcntl.flock(self.locked_file, fcntl.LOCK_SH)
        size = os.fstat(self.locked_file.fileno()).st_size
        expected = len(location.header) + int(self.entries["length"].sum())
        if size != expected:
            raise DamagedCacheError(f"{location.data} has {size:,} bytes, not {expected:,}")
        if self.locked_file.read(len(location.header)) != location.header:
            raise DamagedCacheError(f"{location.data} does not belong to its index")
        if not os.fstat(self.locked_file.fileno()).st_nlink:
            raise FileNotFoundError(f"{location.data} was removed")
        # Private and writable, or torch warns of every array; nothing writes to it. Without MAP_NORESERVE Linux refuses
        # a private map that is larger than the memory.
        flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        self.data = np.frombuffer(mmap.mmap(self.locked_file.fileno(), size, flags=flags, prot=access), np.uint8)
        self._is_checked = np.zeros(location.num_images, bool)
        if not location.persistent:
            weakref.finalize(self, _remove_if_unused, location, self.locked_file, os.getpid())  # at exit, if not before

    def read(self, number: int) -> StoredImage:
        """One image. DamagedCacheError when its bytes are not those that were written.

        Each process compares the checksum at its first read: to compare all of them at the start would mean to read the
        whole file, perhaps hundreds of GB.
        """
        start, length, height, width, kind, checksum = self.entries[number].tolist()
        content = self.data[start : start + length]
        if not self._is_checked[number]:
            if zlib.crc32(content) != checksum:
                raise DamagedCacheError(
                    f"its bytes in {self.location.data} are damaged; remove that file, and the next start rebuilds it"
                )
            self._is_checked[number] = True
        return StoredImage(kind, height, width, content)

    def __reduce__(self):
        return CacheFile, (self.location,)


def _remove_if_unused(location: CacheLocation, file: BinaryIO, pid: int) -> None:
    """Remove a cache unless another process uses it. A forked worker shares its parent's lock, and must not."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            location.remove()


def find_resume_point(location: CacheLocation) -> tuple[int, int]:
    """The number of images in an unfinished cache, and the byte where their data ends."""
    start = len(location.header)
    try:
        entries, _ = read_index(location.partial_index, location.header)
        with open(location.data, "rb") as data:
            belongs = data.read(start) == location.header
            size = os.fstat(data.fileno()).st_size
    except FileNotFoundError:
        return 0, start
    ends = start + np.cumsum(entries["length"])
    is_right = belongs & (entries["start"] + entries["length"] == ends) & (ends <= size)
    num_done = len(entries) if is_right.all() else int(is_right.argmin())
    return num_done, int(ends[num_done - 1]) if num_done else start


class CacheWriter:
    """Appends images to a cache, from where an earlier start stopped. Use it under `location.lock`."""

    def __init__(self, location: CacheLocation):
        self.location = location
        self.num_done, self.end = find_resume_point(location)
        if not self.num_done:
            location.remove()  # rather than overwrite: another run may have a damaged one mapped
        self._data, self._index = open(location.data, "ab"), open(location.partial_index, "ab")  # noqa: SIM115
        for file, end in (
            (self._data, self.end),
            (self._index, len(location.header) + self.num_done * ENTRY.itemsize),
        ):
            if self.num_done:
                file.truncate(end)
            else:
                file.write(location.header)
        self._uncommitted: list[tuple] = []  # entries of images that may not be on the disk yet

    def add(self, image: StoredImage) -> None:
        """Append the next image."""
        length = self._data.write(image.content)
        checksum = zlib.crc32(image.content)
        self._uncommitted.append((self.end, length, image.height, image.width, image.kind, checksum))
        self.end += length
        self.num_done += 1
        if len(self._uncommitted) == IMAGES_PER_COMMIT:
            self.commit()

    def commit(self) -> None:
        """Bring the images to the disk, then write their entries."""
        sync(self._data)
        self._index.write(np.array(self._uncommitted, ENTRY).tobytes())
        self._index.flush()
        self._uncommitted = []

    def finish(self) -> None:
        """Declare the cache complete."""
        self.commit()
        self._index.write(checksum_of(self.location.partial_index.read_bytes()))
        sync(self._index)
        os.replace(self.location.partial_index, self.location.index)
        sync_folder(self.location.folder)

    def close(self) -> None:
        for file in (self._data, self._index):
            with contextlib.suppress(OSError):  # a full disk, which was reported before
                file.close()
