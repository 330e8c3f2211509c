"""DATA.CACHE: decodes each image once, and then reads its pixels from a file that is mapped into memory.

Tar shards are no replacement: they hold encoded images, and the cache is fast because it has nothing to decode.
"""

import contextlib
import functools
import hashlib
import json
import math
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import Config, Data
from datasets.image_set import ImageSet, Rows, Storage
from datasets.index import ENDING, IndexBuilder, caches_folder, open_index
from datasets.passes import read_each
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError
from datasets.types import CacheProgress
from utils.errors import StoppedBySignal
from utils.files import check_writable, free_bytes, locked, sync, without_waiting
from utils.host import count_cores
from utils.text import counted, format_bytes, format_bytes_apart

VERSION = 7  # version of the format of both files and of the key
# The place and the size of each image. An unreadable image has height 0, and its width is the length of an error
# message.
COLUMNS = {"start": "<u8", "height": "<u4", "width": "<u4"}
# Older versions of Python do not define MAP_NORESERVE.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
NUM_SAMPLED = 64  # number of images from which the total size is estimated
IMAGES_AHEAD_PER_THREAD = 2  # number of images that each thread decodes ahead of the writer
FILES_PER_TASK = 4096
REMEDY = "Set DATA.CACHE_PATH to a writable folder with enough space; DATA.CACHE=256 needs less space"


# --- the files of a cache ---


class CacheLocation(NamedTuple):
    """The files of a cache."""

    folder: Path
    data_set: str  # name of the data set, part and folder; only the newest cache of this name is kept
    key: str  # hash of everything that the stored images depend on

    @property
    def data(self) -> Path:
        return self.folder / f"{self.data_set}-{self.key}.data"

    @property
    def index(self) -> Path:
        return self.data.with_suffix(ENDING)

    def remove(self) -> None:
        for path in (self.index, self.data):
            path.unlink(missing_ok=True)


def locate_cache(config: Config, part: str, image_set: ImageSet) -> CacheLocation:
    """Return the location of this set's cache, which need not exist."""
    root = hashlib.sha256(os.fsencode(os.path.realpath(image_set.root))).hexdigest()[:16]
    files = hash_files(image_set, count_threads(config))
    key = {"version": VERSION, "files": files, "pixels": image_set.pixels.identity()}
    if side := config.DATA.cache_side:  # the interpolation matters only if images are resized
        key |= {"side": side, "interpolation": config.DATA.INTERPOLATION}
    name = f"{config.DATA.DATASET.replace('/', '-')}-{part}-{root}"
    return CacheLocation(caches_folder(config), name, hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16])


def hash_files(image_set: ImageSet, num_threads: int) -> str:
    """Return a hash of the paths, sizes and dates of all images, in order. It changes if any image changes."""

    def describe(first: int) -> bytes:
        numbers = range(first, min(first + FILES_PER_TASK, len(image_set)))
        return os.fsencode("".join(f"{image_set.storage.stamp(image_set.row(number))}\n" for number in numbers))

    with ThreadPoolExecutor(num_threads, "cache") as pool:
        return hashlib.sha256(b"".join(pool.map(describe, range(0, len(image_set), FILES_PER_TASK)))).hexdigest()


def count_threads(config: Config) -> int:
    return config.DATA.NUM_WORKERS or count_cores()


class CacheFile:
    """A complete cache, mapped into memory: all processes of a machine share its pages."""

    def __init__(self, location: CacheLocation):
        """Open the cache. Raise FileNotFoundError if it is missing or damaged."""
        self.location, index = location, open_index(location.index)
        if index is None or location.data.stat().st_size != index.facts["size"]:
            raise FileNotFoundError(location.index)
        self.columns = [index.column(name) for name in COLUMNS]
        self.num_channels, size = index.facts["channels"], index.facts["size"]
        self.dtype = np.dtype(index.facts["type"])
        with open(location.data, "rb", opener=without_waiting) as file:
            # The map is private and writable, because torch warns about read-only arrays; nothing writes to it. Without
            # MAP_NORESERVE, Linux refuses a private map that is larger than the memory.
            flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self.data = np.frombuffer(mmap.mmap(file.fileno(), size, flags=flags, prot=access), np.uint8)

    def read(self, index: int) -> np.ndarray:
        """Return an image like ImageSet.read."""
        start, height, width = (int(column[index]) for column in self.columns)
        if height == 0:
            raise ImageReadError(os.fsdecode(self.data[start : start + width].tobytes()))
        shape = height, width, self.num_channels
        return self.data[start : start + math.prod(shape) * self.dtype.itemsize].view(self.dtype).reshape(shape)

    def __reduce__(self):
        return CacheFile, (self.location,)


def open_cache(location: CacheLocation) -> CacheFile | None:
    """Return the cache, or None if it is missing or damaged."""
    try:
        return CacheFile(location)
    except FileNotFoundError:
        return None


def write_cache(location: CacheLocation, pixels: Pixels, images: Iterable[tuple[int, int, bytes | np.ndarray]]) -> None:
    """Write images (height, width, content), and then the index, which marks the cache as complete.

    An unfinished cache is removed. The caller must hold the lock.
    """
    location.remove()  # not overwritten, because another run may have mapped the damaged cache
    builder, end = IndexBuilder(COLUMNS), 0
    try:
        with open(location.data, "wb") as file:
            for height, width, content in images:
                for name, value in zip(COLUMNS, (end, height, width), strict=True):
                    builder.add(name, [value])
                # Types of several bytes must be aligned to be read in place, also after the text of an error.
                end += file.write(content) + file.write(bytes(-file.tell() % pixels.dtype.itemsize))
            sync(file)
        facts = {"size": end, "channels": pixels.num_channels, "type": pixels.dtype.name}
        builder.finish(facts).save(location.index)
    except BaseException:
        location.remove()
        raise


# --- the sets of a run ---


def cache_image_sets(
    config: Config, image_sets: tuple[ImageSet | None, ImageSet], progress: CacheProgress
) -> tuple[ImageSet | None, ImageSet]:
    """Return the training and validation set, read from the cache if DATA.CACHE is on. Build a missing cache first."""
    if config.DATA.CACHE == "none":
        return image_sets
    short_side = math.floor(config.DATA.IMAGE_SIZE / config.DATA.CROP_PCT)
    if (side := config.DATA.cache_side) and side < short_side:
        progress.warn(f"DATA.CACHE is {side}; evaluation will enlarge the cached images to {short_side}")
    train, val = image_sets
    train = None if train is None else _cache_image_set(config, "training", train, progress)
    return train, _cache_image_set(config, "validation", val, progress)


def _cache_image_set(config: Config, part: str, image_set: ImageSet, progress: CacheProgress) -> ImageSet:
    if image_set.root is None:
        reason = "which are in memory already" if image_set.storage.in_memory else "whose files are not known"
        progress.say(f"cache: not used for the {part} images of {config.DATA.DATASET}, {reason}")
        return image_set
    location = locate_cache(config, part, image_set)
    file = None
    try:
        file = open_cache(location)
        if file is None and progress.is_check:
            check_writable(location.folder)
            progress.say(f"cache: a run writes {check_space(config, location, image_set)}")
        elif file is None and progress.may_build:
            file = build_cache(config, location, image_set, progress)
    except OSError as error:
        progress.warn(f"DATA.CACHE: {error}; continuing without a cache of the {part} images. {REMEDY}")
    if file is None:
        return image_set
    progress.say(
        f"cache: {counted(len(image_set), f'{part} image')}, {format_bytes(len(file.data))}, in {location.data}"
    )
    return replace(image_set, storage=CachedStorage(image_set, file))


class CachedStorage(Storage):
    """The images of a part, whose pixels are read from a cache. Everything else is that of their storage."""

    def __init__(self, part: ImageSet, file: CacheFile):
        self.storage, self.file = part.storage, file
        self.root, self.index = part.root, part.storage.index
        self.is_encoded, self.names_are_numbers = self.storage.is_encoded, self.storage.names_are_numbers
        self._places = None  # the place of each row in the cache; None: its own
        if part.rows is not None:
            self._places = np.zeros(len(self.storage), np.uint32)
            self._places[part.rows] = np.arange(len(part), dtype=np.uint32)

    def __len__(self) -> int:
        return len(self.storage)

    def read(self, row: int, pixels: Pixels) -> np.ndarray:
        return self.file.read(row if self._places is None else int(self._places[row]))

    def kinds(self, row: int, pixels: Pixels) -> Sequence[str]:
        return self.storage.kinds(row, pixels)

    def file_of(self, row: int, pixels: Pixels) -> tuple[str, bytes]:
        return self.storage.file_of(row, pixels)

    def name(self, row: int) -> str:
        return self.storage.name(row)

    def key(self, row: int) -> str:
        return self.storage.key(row)

    def table_name(self, row: int) -> str:
        return self.storage.table_name(row)

    def keys(self, rows: Rows, count: int) -> Iterable[list[bytes]]:
        return self.storage.keys(rows, count)

    def naming(self, rows: Rows, count: int) -> Iterable[bytes | np.ndarray]:
        return self.storage.naming(rows, count)

    def stamp(self, row: int) -> str:
        return self.storage.stamp(row)

    def file_sizes(self, rows: Sequence[int]) -> list[int]:
        return self.storage.file_sizes(rows)

    def epoch_order(self, rows: Rows, count: int, seed: int, epoch: int) -> np.ndarray:
        return self.storage.epoch_order(rows, count, seed, epoch)

    def order_to_write(self, rows: Rows, count: int, seed: int) -> np.ndarray:
        return self.storage.order_to_write(rows, count, seed)

    def uncached(self) -> Storage:
        return self.storage


def build_cache(
    config: Config, location: CacheLocation, image_set: ImageSet, progress: CacheProgress
) -> CacheFile | None:
    """Build the cache and return it, or None if another run is building it. Raise OSError if it cannot be written."""
    numbers, num_threads = range(len(image_set)), count_threads(config)

    def decoded() -> Iterator[tuple[int, int, bytes | np.ndarray]]:
        encoding = functools.partial(encode, config.DATA, image_set)
        for _, image in read_each(numbers, encoding, "cache", num_threads, IMAGES_AHEAD_PER_THREAD):
            if progress.signal():
                raise StoppedBySignal(progress.signal(), "while building the image cache")
            yield image

    location.folder.mkdir(parents=True, exist_ok=True)
    with locked(location.folder / f"{location.data_set}.lock") as lock:
        if lock is None:
            progress.say(f"cache: another run is building {location.data_set}; this run reads the image files")
            return None
        try:
            if file := open_cache(location):  # another run has just built it
                return file
            for data in {*location.folder.glob(f"{location.data_set}-{'[0-9a-f]' * 16}.data")} - {location.data}:
                # A run that has opened an older cache can still read it.
                location._replace(key=data.stem[-16:]).remove()
                progress.say(f"cache: removed {data.name}, which was built from other files or with other settings")
            progress.say(f"cache: writing {check_space(config, location, image_set)}")
            with contextlib.closing(decoded()) as images:
                write_cache(location, image_set.pixels, images)
        finally:
            Path(lock.name).unlink(missing_ok=True)
    return open_cache(location)


def encode(data: Data, image_set: ImageSet, index: int) -> tuple[int, int, bytes | np.ndarray]:
    """Return the height, width and content that the cache stores for an image."""
    try:
        pixels = image_set.read(index)
    except ImageReadError as error:
        reason = os.fsencode(str(error))
        return 0, len(reason), reason
    height, width, _ = pixels.shape
    side, short = data.cache_side, min(height, width)
    if side is not None and short > side:
        size = side * height // short, side * width // short
        pixels = image_set.pixels.shrunk(pixels, size, data.INTERPOLATION)
    return *pixels.shape[:2], np.ascontiguousarray(pixels)


def check_space(config: Config, location: CacheLocation, image_set: ImageSet) -> str:
    """Return the size of the cache and the free space as text. Raise OSError if the cache does not fit."""
    needed, free = estimate_bytes(config, image_set), free_bytes(location.folder)
    needs, has = format_bytes_apart(needed, free)
    sizes = f"{counted(len(image_set), 'image')}, about {needs} in {location.folder}, where {has} are free"
    if needed > free:
        raise OSError(f"there is not enough space for {sizes}")
    return sizes


def estimate_bytes(config: Config, image_set: ImageSet) -> int:
    """Return the estimated size of the set in the cache, from a sample of its images."""
    sample = np.linspace(0, len(image_set) - 1, min(len(image_set), NUM_SAMPLED)).astype(int).tolist()

    def size_of(index: int) -> int:
        return memoryview(encode(config.DATA, image_set, index)[2]).nbytes

    sizes = read_each(sample, size_of, "", count_threads(config))
    return int(np.mean([size for _, size in sizes]) * len(image_set))
