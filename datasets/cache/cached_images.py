"""DATA.CACHE: images read from a file that is mapped into memory instead of from their own files.

Tar shards cannot do this: they hold encoded images, and what makes the cache fast is that there is nothing to decode.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np

from configs.schema import Config
from datasets.cache.build import CacheEncoder, CacheError, CacheProgress, build_cache
from datasets.cache.file import JPEG, PIXELS, CacheFile, CacheLocation, DamagedCacheError
from datasets.index.place import caches_folder
from datasets.shuffle import EpochOrder
from datasets.transforms.decode import decode
from datasets.types import ImageReadError, ImageSet
from utils.errors import ConfigError
from utils.host import SHARED_MEMORY, count_cores
from utils.text import counted, format_bytes

SECONDS_BETWEEN_ATTEMPTS = 0.2  # to take a lock that another run holds
FILES_PER_TASK = 4096
REMEDY_FOR_SPACE = "DATA.CACHE_FORM=jpeg or a smaller DATA.CACHE_SIDE takes less; DATA.CACHE_PATH sets another folder"


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

    def epoch_order(self, seed: int, epoch: int) -> EpochOrder:
        return self._image_set.epoch_order(seed, epoch)

    def read(self, index: int) -> np.ndarray:
        try:
            kind, height, width, content = self.cache.read(index)
        except DamagedCacheError as error:
            raise ImageReadError(str(error)) from error
        if kind == PIXELS:
            return content.reshape(height, width, self._image_set.rules.num_channels)
        if kind == JPEG:
            return decode(content.tobytes(), self._image_set.rules)
        raise ImageReadError(os.fsdecode(content.tobytes()))


def cache_image_sets(
    config: Config, image_sets: tuple[ImageSet | None, ImageSet], progress: CacheProgress
) -> tuple[ImageSet | None, ImageSet]:
    """Training and validation set, read from the cache that DATA.CACHE asks for. A missing cache is built first."""
    if config.DATA.CACHE == "none":
        return image_sets
    check_ram_cache_is_possible(config)
    short_side = math.floor(config.DATA.IMAGE_SIZE / config.DATA.CROP_PCT)
    if config.DATA.CACHE_SIDE and config.DATA.CACHE_SIDE < short_side:
        progress.warn(
            f"DATA.CACHE_SIDE is {config.DATA.CACHE_SIDE}; evaluation will enlarge these images to {short_side}"
        )
    train, val = image_sets
    train = None if train is None else _cache_image_set(config, "training", train, progress)
    return train, _cache_image_set(config, "validation", val, progress)


def check_ram_cache_is_possible(config: Config) -> None:
    if config.DATA.CACHE == "ram" and not SHARED_MEMORY.is_dir():
        raise ConfigError(
            f"DATA.CACHE: ram needs {SHARED_MEMORY}, which this machine does not have; set it to disk or none"
        )


def _cache_image_set(config: Config, part: str, image_set: ImageSet, progress: CacheProgress) -> ImageSet:
    reason = why_not_cacheable(image_set)
    if reason:
        progress.say(f"cache: not for the {part} images of {config.DATA.DATASET}, {reason}")
        return image_set
    location = locate_cache(config, part, image_set)
    try:
        cache = open_cache(location)
        if cache is None and progress.may_build:
            cache = _build_or_wait(config, location, image_set, progress)
    except (CacheError, OSError) as error:
        if isinstance(error, CacheError):
            problem, remedy = str(error), REMEDY_FOR_SPACE
        else:
            problem, remedy = f"{location.folder} cannot be used ({error})", remedy_for_folder(location)
        progress.warn(f"DATA.CACHE: {problem}; continuing without a cache of the {part} images. {remedy}")
        return image_set
    if cache is None:
        return image_set
    progress.say(
        f"cache: {counted(len(image_set), f'{part} image')}, {format_bytes(len(cache.data))}, in {location.data}"
    )
    return CachedImages(image_set, cache)


def why_not_cacheable(image_set: ImageSet) -> str | None:
    """Why a cache of this set is not possible or useful; None if it is."""
    if image_set.in_memory:
        return "which are in memory already"
    return "whose files are not known" if image_set.root is None else None


def remedy_for_folder(location: CacheLocation) -> str:
    """What to do where the folder of a cache cannot be used."""
    return "Set DATA.CACHE_PATH to a writable folder" if location.persistent else "DATA.CACHE=disk needs no memory"


def count_threads(config: Config) -> int:
    return config.DATA.NUM_WORKERS or count_cores()


def locate_cache(config: Config, part: str, image_set: ImageSet) -> CacheLocation:
    """The location of this set's cache, whether it exists or not."""
    data, root = config.DATA, os.fsencode(os.path.realpath(image_set.root))
    folder = SHARED_MEMORY / f"halfstep-{os.getuid()}" if data.CACHE == "ram" else caches_folder(config)
    key = {
        "files": hash_files(image_set, count_threads(config)),
        "pixels": asdict(image_set.rules),
        **CacheEncoder(data).key,
    }
    name = f"{data.DATASET.replace('/', '-')}-{part}-{hashlib.sha256(root).hexdigest()[:16]}"
    return CacheLocation(folder, name, key, len(image_set), persistent=data.CACHE == "disk")


def hash_files(image_set: ImageSet, num_threads: int) -> str:
    """A hash of all paths, sizes and dates in their order, which changes with any image."""

    def describe(first: int) -> bytes:
        numbers = range(first, min(first + FILES_PER_TASK, len(image_set)))
        return os.fsencode("".join(f"{image_set.stamp(number)}\n" for number in numbers))

    with ThreadPoolExecutor(num_threads, "cache") as pool:
        return hashlib.sha256(b"".join(pool.map(describe, range(0, len(image_set), FILES_PER_TASK)))).hexdigest()


def open_cache(location: CacheLocation, warn: Callable[[str], None] = lambda line: None) -> CacheFile | None:
    """The complete cache; None where there is none or it is damaged."""
    try:
        return CacheFile(location)
    except FileNotFoundError:
        return None
    except DamagedCacheError as error:
        warn(f"DATA.CACHE: {error}; rebuilding it")
        return None


def _build_or_wait(
    config: Config, location: CacheLocation, image_set: ImageSet, progress: CacheProgress
) -> CacheFile | None:
    """The cache, built here or by another run that this one waits for."""
    location.folder.mkdir(mode=0o777 if location.persistent else 0o700, parents=True, exist_ok=True)
    if not location.persistent and location.folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{location.folder} belongs to another user")
    with _build_lock(location, progress):
        cache = open_cache(location, progress.warn)
        if cache is None:
            location.index.unlink(missing_ok=True)  # a damaged one
            for name in location.remove_older():
                progress.say(f"cache: removed {name}, which was built from other files or with other settings")
            build_cache(location, image_set, CacheEncoder(config.DATA), count_threads(config), progress)
            cache = open_cache(location, progress.warn)
    return cache


@contextlib.contextmanager
def _build_lock(location: CacheLocation, progress: CacheProgress) -> Iterator[None]:
    """Only one process builds a cache of this data set at a time."""
    reported = False
    while True:
        with open(location.lock, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it even after kill -9
            except BlockingIOError:
                if not reported:
                    progress.say(f"cache: another run is building {location.data_set}; waiting for it")
                reported = True
                progress.check()
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
                continue
            if not os.fstat(lock.fileno()).st_nlink:  # its last owner removed it; the next one locks another file
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    location.lock.unlink()
            return
