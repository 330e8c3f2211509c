"""DATA.CACHE: decodes each image once, and then reads its pixels from a file that is mapped into memory.

Tar shards are no replacement: they hold encoded images, and the cache is fast because it has nothing to decode.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from configs.schema import Config, Data
from datasets.index import ENDING, IndexBuilder, caches_folder, open_index
from datasets.transforms.crop import resize
from datasets.types import ImageReadError, ImageSet
from utils.errors import StoppedBySignal
from utils.files import check_writable, free_bytes, locked, sync, without_waiting
from utils.host import count_cores
from utils.log import shown
from utils.read_ahead import read_ahead
from utils.text import counted, format_bytes, format_bytes_apart

# --- the files of a cache ---


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


IS_REASON = 0  # height stored for an unreadable image; the error message is stored as its content
NUM_SAMPLED = 64  # number of images from which the total size is estimated
IMAGES_AHEAD_PER_THREAD = 2  # number of images that each thread decodes ahead of the writer
FILES_PER_TASK = 4096
REMEDY = "Set DATA.CACHE_PATH to a writable folder with enough space; DATA.CACHE=256 needs less space"


class CacheError(Exception):
    """Raised if the cache cannot be built. The message gives the reason."""


@dataclass(frozen=True)
class CacheProgress:
    """Callbacks for progress and cancellation, and whether to build a missing cache."""

    say: Callable[[str], None]
    warn: Callable[[str], None]
    signal: Callable[[], int] = lambda: 0  # returns the number of the signal that has arrived, or 0
    may_build: bool = True
    is_check: bool = False  # describe a missing cache instead of building it

    def check(self) -> None:
        """Raise StoppedBySignal if a signal has arrived."""
        if self.signal():
            raise StoppedBySignal(self.signal(), "while building the image cache")


def locate_cache(config: Config, part: str, image_set: ImageSet) -> CacheLocation:
    """Return the location of this set's cache, which need not exist."""
    root = hashlib.sha256(os.fsencode(os.path.realpath(image_set.root))).hexdigest()[:16]
    files = hash_files(image_set, count_threads(config))
    key = {"files": files, "pixels": asdict(image_set.rules)}
    if side := config.DATA.cache_side:  # the interpolation matters only if images are resized
        key |= {"side": side, "interpolation": config.DATA.INTERPOLATION}
    name = f"{config.DATA.DATASET.replace('/', '-')}-{part}-{root}"
    return CacheLocation(caches_folder(config), name, key, len(image_set))


def hash_files(image_set: ImageSet, num_threads: int) -> str:
    """Return a hash of the paths, sizes and dates of all images, in order. It changes if any image changes."""

    def describe(first: int) -> bytes:
        numbers = range(first, min(first + FILES_PER_TASK, len(image_set)))
        return os.fsencode("".join(f"{image_set.stamp(number)}\n" for number in numbers))

    with ThreadPoolExecutor(num_threads, "cache") as pool:
        return hashlib.sha256(b"".join(pool.map(describe, range(0, len(image_set), FILES_PER_TASK)))).hexdigest()


def count_threads(config: Config) -> int:
    return config.DATA.NUM_WORKERS or count_cores()


# --- cached images ---


class CachedImages(ImageSet):
    """The images of another set, read from a cache."""

    def __init__(self, image_set: ImageSet, cache: CacheFile):
        super().__init__(image_set.targets, image_set.classes)
        self.label_sets = image_set.label_sets
        self._image_set, self.cache = image_set, cache
        self.root, self.notes, self.split = image_set.root, image_set.notes, image_set.split

    def name(self, index: int) -> str:
        return self._image_set.name(index)

    def key(self, index: int) -> str:
        return self._image_set.key(index)

    def table_name(self, index: int) -> str:
        return self._image_set.table_name(index)

    def naming(self) -> Iterable[bytes | np.ndarray]:
        return self._image_set.naming()

    def file_sizes(self, indices: Sequence[int]) -> list[int]:
        return self._image_set.file_sizes(indices)

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        return self._image_set.epoch_order(seed, epoch)

    def read(self, index: int) -> np.ndarray:
        try:
            height, width, content = self.cache.read(index)
        except DamagedCacheError as error:
            raise ImageReadError(str(error)) from error
        if height == IS_REASON:
            raise ImageReadError(os.fsdecode(content.tobytes()))
        if len(content) != height * width * (
            num_channels := self._image_set.rules.num_channels
        ):  # in a hand-made cache
            raise ImageReadError(f"{self.cache.location.index} is damaged; remove it, and the next start rebuilds it")
        return content.reshape(height, width, num_channels)


def open_cache(location: CacheLocation, warn: Callable[[str], None] = lambda line: None) -> CacheFile | None:
    """Return the cache if it is complete, or None if it is missing or damaged."""
    try:
        return CacheFile(location)
    except FileNotFoundError:
        return None
    except DamagedCacheError as error:
        warn(f"DATA.CACHE: {error}; rebuilding it")
        return None


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
    reason = why_not_cacheable(image_set)
    if reason:
        progress.say(f"cache: not used for the {part} images of {config.DATA.DATASET}, {reason}")
        return image_set
    location = locate_cache(config, part, image_set)
    try:
        cache = open_cache(location)
        if cache is None and progress.is_check:
            check_writable(location.folder)
            with ThreadPoolExecutor(count_threads(config), "cache") as pool:
                progress.say(f"cache: a run writes {check_space(config, location, image_set, pool)}")
        elif cache is None and progress.may_build:
            cache = _build_or_wait(config, location, image_set, progress)
    except (CacheError, OSError) as error:
        progress.warn(f"DATA.CACHE: {error}; continuing without a cache of the {part} images. {REMEDY}")
        return image_set
    if cache is None:
        return image_set
    progress.say(
        f"cache: {counted(len(image_set), f'{part} image')}, {format_bytes(len(cache.data))}, in {location.data}"
    )
    return CachedImages(image_set, cache)


def why_not_cacheable(image_set: ImageSet) -> str | None:
    """Return the reason why a cache of this set is impossible or useless, or None if there is none."""
    if image_set.in_memory:
        return "which are in memory already"
    return "whose files are not known" if image_set.root is None else None


# --- building ---


def encode(data: Data, image_set: ImageSet, index: int) -> tuple[int, int, bytes | np.ndarray]:
    """Return the height, width and content that the cache stores for an image."""
    try:
        pixels = image_set.read(index)
    except ImageReadError as error:
        return IS_REASON, 0, os.fsencode(str(error))
    height, width, num_channels = pixels.shape
    side, short = data.cache_side, min(height, width)
    if side is not None and short > side:
        smaller = torch.empty((side * height // short, side * width // short, num_channels), dtype=torch.uint8)
        resize(pixels, data.INTERPOLATION, smaller.permute(2, 0, 1))
        pixels = smaller.numpy()
    return *pixels.shape[:2], np.ascontiguousarray(pixels)


def _build_or_wait(
    config: Config, location: CacheLocation, image_set: ImageSet, progress: CacheProgress
) -> CacheFile | None:
    """Return the cache. Build it, or wait for another run that is building it."""
    waits = []

    def wait() -> None:
        if not waits:
            progress.say(f"cache: another run is building {location.data_set}; waiting for it")
        waits.append(True)
        progress.check()

    location.folder.mkdir(parents=True, exist_ok=True)
    with locked(location.lock, wait):
        try:
            cache = open_cache(location, progress.warn)
            if cache is None:
                for name in location.remove_older():
                    progress.say(f"cache: removed {name}, which was built from other files or with other settings")
                build_cache(config, location, image_set, progress)
                cache = open_cache(location, progress.warn)
        finally:
            location.lock.unlink(missing_ok=True)
    return cache


def build_cache(config: Config, location: CacheLocation, image_set: ImageSet, progress: CacheProgress) -> None:
    """Build the cache, or raise CacheError. An unfinished cache is removed."""
    num_threads = count_threads(config)
    with contextlib.closing(CacheWriter(location)) as writer, ThreadPoolExecutor(num_threads, "cache") as pool:
        numbers = range(location.num_images)
        try:
            progress.say(f"cache: writing {check_space(config, location, image_set, pool)}")
            started = (pool.submit(encode, config.DATA, image_set, number) for number in numbers)
            futures = read_ahead(started, num_threads * IMAGES_AHEAD_PER_THREAD)
            for future in shown(futures, "cache", len(numbers)):
                progress.check()
                writer.add(*future.result())
            writer.finish()
        except (CacheError, OSError) as error:
            raise CacheError(f"{location.data} cannot be written ({error})") from error
        finally:
            pool.shutdown(cancel_futures=True)


def check_space(config: Config, location: CacheLocation, image_set: ImageSet, pool: ThreadPoolExecutor) -> str:
    """Return the size of the cache and the free space as text. Raise CacheError if the cache does not fit."""
    needed, free = estimate_bytes(config.DATA, image_set, pool), free_bytes(location.folder)
    needs, has = format_bytes_apart(needed, free)
    sizes = f"{counted(len(image_set), 'image')}, about {needs} in {location.folder}, where {has} are free"
    if needed > free:
        raise CacheError(f"there is not enough space for {sizes}")
    return sizes


def estimate_bytes(data: Data, image_set: ImageSet, pool: ThreadPoolExecutor) -> int:
    """Return the estimated size of the set in the cache, from a sample of its images."""
    sample = np.linspace(0, len(image_set) - 1, min(len(image_set), NUM_SAMPLED)).astype(int).tolist()
    lengths = pool.map(lambda index: memoryview(encode(data, image_set, index)[2]).nbytes, sample)
    return int(np.mean(list(lengths)) * len(image_set))
