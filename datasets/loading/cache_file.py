"""The two files of a cache: `.data` has the pixels of the images one after the other, `.index` says where each one is.

While a cache is built, a `.part` takes the place of the index: entries are appended to it once their images are on the disk.
After a kill, what has no entry is cut off and written again.
"""

import contextlib
import glob
import hashlib
import json
import mmap
import os
import sys
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from datasets.index import ENDING, IndexWriter, Place, open_index
from utils.files import sync

VERSION = 4  # of what is in both files
IMAGES_PER_COMMIT = 256
ENTRY = np.dtype([("start", "<u8"), ("length", "<u8"), ("height", "<u4"), ("width", "<u4"), ("checksum", "<u4")])
# Older versions of Python have no name for it.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class DamagedCacheError(Exception):
    """A cache differs from what was written; the message names the file."""


@dataclass(frozen=True)
class CacheLocation:
    """The files of a cache, and the key that its content must have."""

    folder: Path
    data_set: str  # only the newest cache of a data set is kept
    key: dict  # everything that the stored images depend on
    num_images: int

    @cached_property
    def _stem(self) -> str:
        content = json.dumps([VERSION, self.data_set, self.num_images, self.key], sort_keys=True)
        return f"{self.data_set}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    @property
    def data(self) -> Path:
        return self.folder / f"{self._stem}.data"

    @property
    def index(self) -> Path:
        return self.folder / f"{self._stem}{ENDING}"

    @property
    def part(self) -> Path:
        return self.folder / f"{self._stem}.part"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.data_set}.lock"

    def remove(self) -> None:
        for path in (self.index, self.part, self.data):
            path.unlink(missing_ok=True)

    def remove_older(self) -> list[str]:
        """Remove other caches of this data set. A run that reads one goes on with it: files stay as long as they are open."""
        older = set(self.folder.glob(f"{glob.escape(self.data_set)}-{'[0-9a-f]' * 16}.data")) - {self.data}
        for data in older:
            for ending in (ENDING, ".part", ".data"):
                data.with_suffix(ending).unlink(missing_ok=True)
        return sorted(each.name for each in older)


class CacheFile:
    """A complete cache, mapped into memory: all processes of a machine share its pages."""

    def __init__(self, location: CacheLocation):
        """FileNotFoundError when there is none, DamagedCacheError when it differs from what was written."""
        self.location, index = location, open_index(location.index)
        if index is None:
            if not location.index.exists():
                raise FileNotFoundError(location.index)
            raise DamagedCacheError(f"{location.index} is damaged")
        self.columns = [index.column(name) for name in ENTRY.names]
        with open(location.data, "rb") as file:
            size, expected = os.fstat(file.fileno()).st_size, index.facts["size"]
            if size != expected:
                raise DamagedCacheError(f"{location.data} has {size:,} bytes, not {expected:,}")
            # Private and writable, or torch warns of every array; nothing writes to it. Without MAP_NORESERVE Linux refuses
            # a private map that is larger than the memory.
            flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self.data = np.frombuffer(mmap.mmap(file.fileno(), size, flags=flags, prot=access), np.uint8)
        self._is_checked = np.zeros(location.num_images, bool)

    def read(self, number: int) -> tuple[int, int, np.ndarray]:
        """Height, width and bytes of an image. DamagedCacheError when the bytes are not those that were written.

        Each process compares the checksum at its first read: to compare all of them at the start would mean to read the
        whole file, perhaps hundreds of GB.
        """
        start, length, height, width, checksum = (int(column[number]) for column in self.columns)
        content = self.data[start : start + length]
        if not self._is_checked[number]:
            if zlib.crc32(content) != checksum:
                raise DamagedCacheError(
                    f"its bytes in {self.location.data} are damaged; remove that file, and the next start rebuilds it"
                )
            self._is_checked[number] = True
        return height, width, content

    def __reduce__(self):
        return CacheFile, (self.location,)


class CacheWriter:
    """Appends images to a cache, from where an earlier start stopped. Use it under `location.lock`."""

    def __init__(self, location: CacheLocation):
        self.location = location
        self.num_done, self.end = find_resume_point(location)
        if not self.num_done:
            location.remove()  # rather than overwrite: another run may have a damaged one mapped
        self._data, self._part = (open(path, "a+b") for path in (location.data, location.part))  # noqa: SIM115
        self._data.truncate(self.end)
        self._part.truncate(self.num_done * ENTRY.itemsize)
        self._uncommitted: list[tuple] = []  # entries of images that may not be on the disk yet

    def add(self, height: int, width: int, content: bytes | np.ndarray) -> None:
        """Append the next image."""
        length = self._data.write(content)
        self._uncommitted.append((self.end, length, height, width, zlib.crc32(content)))
        self.end += length
        self.num_done += 1
        if len(self._uncommitted) == IMAGES_PER_COMMIT:
            self.commit()

    def commit(self) -> None:
        """Bring the images to the disk, then write their entries."""
        sync(self._data)
        self._part.write(np.array(self._uncommitted, ENTRY).tobytes())
        self._part.flush()
        self._uncommitted = []

    def finish(self) -> None:
        """Write the index, which declares the cache complete."""
        self.commit()
        entries = np.fromfile(self.location.part, ENTRY)
        with Place(self.location.index) as place:
            writer = IndexWriter(place, {name: entries.dtype[name].str for name in ENTRY.names}, small=-1)
            for name in ENTRY.names:
                writer.add(name, entries[name])
            writer.finish({"size": self.end})
        self.location.part.unlink()

    def close(self) -> None:
        for file in (self._data, self._part):
            with contextlib.suppress(OSError):  # a full disk, which was reported before
                file.close()


def find_resume_point(location: CacheLocation) -> tuple[int, int]:
    """The number of images in an unfinished cache, and the byte where their data ends."""
    try:
        size, content = location.data.stat().st_size, location.part.read_bytes()
    except FileNotFoundError:
        return 0, 0
    entries = np.frombuffer(content, ENTRY, min(len(content) // ENTRY.itemsize, location.num_images))
    ends = np.cumsum(entries["length"])
    is_right = (entries["start"] + entries["length"] == ends) & (ends <= size)
    num_done = len(entries) if is_right.all() else int(is_right.argmin())
    return num_done, int(ends[num_done - 1]) if num_done else 0
