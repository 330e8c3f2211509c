"""The two files of a cache: `.data` has the pixels of the images one after the other, `.index` says where each one is.

The index is written last and declares the cache complete: without it the next start builds the cache anew.
"""

import contextlib
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

from datasets.index import ENDING, IndexWriter, Place, Shape, open_index
from utils.files import sync, without_waiting

VERSION = 4  # of what is in both files
ENTRY = np.dtype([("start", "<u8"), ("length", "<u8"), ("height", "<u4"), ("width", "<u4"), ("checksum", "<u4")])
COLUMNS = {name: ENTRY[name].str for name in ENTRY.names}
SHAPE = Shape(COLUMNS, [" ".join(COLUMNS)], {"size": int})
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
    def lock(self) -> Path:
        return self.folder / f"{self.data_set}.lock"

    def remove(self) -> None:
        for path in (self.index, self.data):
            path.unlink(missing_ok=True)

    def remove_older(self) -> list[str]:
        """Remove other caches of this data set. A run that reads one goes on with it: files stay as long as they are open."""
        older = set(self.folder.glob(f"{self.data_set}-{'[0-9a-f]' * 16}.data")) - {self.data}
        for data in older:
            for ending in (ENDING, ".part", ".data"):  # .part: of unfinished ones of former versions
                data.with_suffix(ending).unlink(missing_ok=True)
        return sorted(each.name for each in older)


class CacheFile:
    """A complete cache, mapped into memory: all processes of a machine share its pages."""

    def __init__(self, location: CacheLocation):
        """FileNotFoundError when there is none, DamagedCacheError when it differs from what was written."""
        self.location, index = location, open_index(location.index)
        if index is None or not index.has(SHAPE) or len(index.column("start")) != location.num_images:
            if not location.index.exists():
                raise FileNotFoundError(location.index)
            raise DamagedCacheError(f"{location.index} is damaged")
        self.columns = [index.column(name) for name in ENTRY.names]
        with open(location.data, "rb", opener=without_waiting) as file:
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
    """Writes the images of a cache one after the other. Use it under `location.lock`."""

    def __init__(self, location: CacheLocation):
        location.remove()  # rather than overwrite: another run may have a damaged one mapped
        self.location, self._data = location, open(location.data, "wb")  # noqa: SIM115
        self._entries = np.empty(location.num_images, ENTRY)
        self.num_done, self._end = 0, 0  # images, and their bytes

    def add(self, height: int, width: int, content: bytes | np.ndarray) -> None:
        """Append the next image."""
        length = self._data.write(content)
        self._entries[self.num_done] = self._end, length, height, width, zlib.crc32(content)
        self._end += length
        self.num_done += 1

    def finish(self) -> None:
        """Bring the images to the disk, then write the index, which declares the cache complete."""
        sync(self._data)
        with Place(self.location.index) as place:
            writer = IndexWriter(place, COLUMNS, small=-1)
            for name in ENTRY.names:
                writer.add(name, self._entries[name])
            writer.finish({"size": self._end})

    def close(self) -> None:
        """Remove what is unfinished."""
        with contextlib.suppress(OSError):  # a full disk, which was reported before
            self._data.close()
        if not self.location.index.exists():
            self.location.remove()
