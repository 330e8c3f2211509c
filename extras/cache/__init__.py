"""DATA.CACHE: decodes each image once, and then reads its pixels from a file that is mapped into memory.

Tar shards are no replacement: they hold encoded images, and the cache is fast because it has nothing to decode.
"""

import contextlib
import hashlib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch

from configs.schema import Config, Data
from datasets.index import caches_folder
from datasets.transforms.crop import resize
from datasets.types import ImageReadError, ImageSet
from extras.cache.file import CacheFile, CacheLocation, CacheWriter, DamagedCacheError
from utils.errors import StoppedBySignal
from utils.files import check_writable, free_bytes, locked
from utils.host import count_cores
from utils.progress import shown
from utils.text import counted, format_bytes, format_bytes_apart

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


# --- reading ---


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

    def find_file_names(self, names: Collection[bytes]) -> Iterator[tuple[int, bytes]]:
        return self._image_set.find_file_names(names)

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
            waiting = deque(itertools.islice(started, num_threads * IMAGES_AHEAD_PER_THREAD))
            for _ in shown(numbers, "cache", len(numbers)):
                progress.check()
                writer.add(*waiting.popleft().result())
                waiting.extend(itertools.islice(started, 1))
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
