"""The two files of a cache: `.data` holds the pixels of all images in sequence, and `.index` holds their offsets.

The index is written last and marks the cache as complete. Without it, the next start rebuilds the cache.
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

from datasets.index import ENDING, IndexBuilder, open_index
from utils.files import sync, without_waiting

VERSION = 6  # version of the format of both files and of the key
ENTRY = np.dtype([("start", "<u8"), ("length", "<u8"), ("height", "<u4"), ("width", "<u4"), ("checksum", "<u4")])
COLUMNS = {name: ENTRY[name].str for name in ENTRY.names}
# Older versions of Python do not define MAP_NORESERVE.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class DamagedCacheError(Exception):
    """Raised if a cache is damaged. The message names the file."""


@dataclass(frozen=True)
class CacheLocation:
    """The paths of a cache, and the key that identifies its content."""

    folder: Path
    data_set: str  # name of the data set, part and folder; only the newest cache of this name is kept
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
        """Remove other caches of this data set and return their names. A run that has opened one can still read it."""
        older = set(self.folder.glob(f"{self.data_set}-{'[0-9a-f]' * 16}.data")) - {self.data}
        for data in older:
            for ending in (ENDING, ".data"):
                data.with_suffix(ending).unlink(missing_ok=True)
        return sorted(each.name for each in older)


class CacheFile:
    """A complete cache, mapped into memory: all processes of a machine share its pages."""

    def __init__(self, location: CacheLocation):
        """Open the cache. Raise FileNotFoundError if there is none, DamagedCacheError if it is damaged."""
        self.location, index = location, open_index(location.index)
        if index is None or len(index.column("start")) != location.num_images:
            if not location.index.exists():
                raise FileNotFoundError(location.index)
            raise DamagedCacheError(f"{location.index} is damaged")
        self.columns = [index.column(name) for name in ENTRY.names]
        with open(location.data, "rb", opener=without_waiting) as file:
            size, expected = os.fstat(file.fileno()).st_size, index.facts["size"]
            if size != expected:
                raise DamagedCacheError(f"{location.data} has {size:,} bytes, not {expected:,}")
            # The map is private and writable, because torch warns about read-only arrays; nothing writes to it. Without
            # MAP_NORESERVE, Linux refuses a private map that is larger than the memory.
            flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self.data = np.frombuffer(mmap.mmap(file.fileno(), size, flags=flags, prot=access), np.uint8)
        self._is_checked = np.zeros(location.num_images, bool)

    def read(self, number: int) -> tuple[int, int, np.ndarray]:
        """Return height, width and bytes of an image. Raise DamagedCacheError if the bytes are damaged.

        Each process verifies the checksum of an image on the first read. Rejected: verifying all checksums at the
        start, because that reads the whole file, perhaps hundreds of GB.
        """
        start, length, height, width, checksum = (int(column[number]) for column in self.columns)
        content = self.data[start : start + length]
        if not self._is_checked[number]:
            if zlib.crc32(content) != checksum:
                raise DamagedCacheError(
                    f"the image's bytes in {self.location.data} are damaged; remove that file, and the next start "
                    "rebuilds it"
                )
            self._is_checked[number] = True
        return height, width, content

    def __reduce__(self):
        return CacheFile, (self.location,)


class CacheWriter:
    """Writes the images of a cache one after the other. The caller must hold `location.lock`."""

    def __init__(self, location: CacheLocation):
        location.remove()  # not overwritten, because another run may have mapped the damaged cache
        self.location, self._data = location, open(location.data, "wb")  # noqa: SIM115
        self._entries = np.empty(location.num_images, ENTRY)
        self.num_done, self._end = 0, 0  # images and bytes written so far

    def add(self, height: int, width: int, content: bytes | np.ndarray) -> None:
        """Append the next image."""
        length = self._data.write(content)
        self._entries[self.num_done] = self._end, length, height, width, zlib.crc32(content)
        self._end += length
        self.num_done += 1

    def finish(self) -> None:
        """Sync the images to the disk, then write the index, which marks the cache as complete."""
        sync(self._data)
        builder = IndexBuilder(COLUMNS)
        for name in ENTRY.names:
            builder.add(name, self._entries[name])
        builder.finish({"size": self._end}).save(self.location.index)

    def close(self) -> None:
        """Remove the files of an unfinished cache."""
        with contextlib.suppress(OSError):  # on a full disk, closing fails too; that error was reported before
            self._data.close()
        if not self.location.index.exists():
            self.location.remove()
