"""DATA.CACHE: images kept in a file that is mapped into memory, in place of the files that they come from."""

import contextlib
import fcntl
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from configs.schema import Config
from datasets.cache.build import CacheFailed, Recipe, Watch, build
from datasets.cache.file import JPEG, PIXELS, CacheFile, DamagedCache, Place
from datasets.transforms.decode import decode
from datasets.types import ImageReadError, ImageSet
from utils.errors import ConfigError
from utils.host import cores_per_process
from utils.units import format_bytes

MEMORY = Path("/dev/shm")
SECONDS_BETWEEN_LOOKS = 0.2  # at a lock that another run holds
FILES_A_TASK = 4096
LESS = "DATA.CACHE_FORM=jpeg or a smaller DATA.CACHE_SIDE takes less, DATA.CACHE_PATH is another folder"


class CachedImages(ImageSet):
    """The images of another set, read from a cache."""

    def __init__(self, image_set: ImageSet, file: CacheFile, numbers: np.ndarray):
        """`numbers[i]`: where in the cache image i of the set is."""
        super().__init__(image_set.targets, image_set.classes)
        self._image_set, self._file, self._numbers = image_set, file, numbers
        self.root, self.notes = image_set.root, image_set.notes

    def name(self, index: int) -> str:
        return self._image_set.name(index)

    def read(self, index: int) -> np.ndarray:
        try:
            kind, height, width, content = self._file.read(int(self._numbers[index]))
        except DamagedCache as error:
            raise ImageReadError(str(error)) from error
        if kind == PIXELS:
            return content.reshape(height, width, self._image_set.num_channels)
        if kind == JPEG:
            return decode(content.tobytes(), self._image_set.num_channels)
        raise ImageReadError(os.fsdecode(content.tobytes()))

    def file(self, index: int) -> tuple[str, bytes]:
        return self._image_set.file(index)

    def stamp(self, index: int) -> str:
        return self._image_set.stamp(index)

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        return self._image_set.epoch_order(seed, epoch)

    def take(self, indices: np.ndarray) -> "CachedImages":
        return CachedImages(self._image_set.take(indices), self._file, self._numbers[indices])


def cache_image_sets(
    config: Config, image_sets: tuple[ImageSet | None, ImageSet], watch: Watch
) -> tuple[ImageSet | None, ImageSet]:
    """Training and validation set, from the cache that DATA.CACHE asks for; it is made first where it is not there."""
    if config.DATA.CACHE == "none":
        return image_sets
    refuse_without_memory(config)
    needed = math.floor(config.DATA.IMAGE_SIZE / config.DATA.CROP_PCT)
    if config.DATA.CACHE_SIDE and config.DATA.CACHE_SIDE < needed:
        watch.warn(f"DATA.CACHE_SIDE is {config.DATA.CACHE_SIDE}; evaluation will enlarge what was shrunk to {needed}")
    train, val = image_sets
    train = None if train is None else _cached(config, "training", train, watch)
    return train, _cached(config, "validation", val, watch)


def refuse_without_memory(config: Config) -> None:
    if config.DATA.CACHE == "ram" and not MEMORY.is_dir():
        raise ConfigError(f"DATA.CACHE: ram needs {MEMORY}, which this machine does not have; set it to disk or none")


def _cached(config: Config, part: str, image_set: ImageSet, watch: Watch) -> ImageSet:
    reason = why_not(image_set)
    if reason:
        watch.say(f"cache: not for the {part} images of {config.DATA.DATASET}, {reason}")
        return image_set
    place = place_of(config, part, image_set)
    try:
        file = open_finished(place)
        if file is None and watch.may_build:
            file = _make(config, place, image_set, watch)
    except (CacheFailed, OSError) as error:
        is_full = isinstance(error, CacheFailed)
        reason, remedy = (error, LESS) if is_full else (f"{place.folder} cannot be used ({error})", remedy_for(place))
        watch.warn(f"DATA.CACHE: {reason}; going on without a cache of the {part} images. {remedy}")
        return image_set
    if file is None:
        return image_set
    watch.say(f"cache: {len(image_set)} {part} images, {format_bytes(len(file.data))}, in {place.data}")
    return CachedImages(image_set, file, np.arange(len(image_set)))


def why_not(image_set: ImageSet) -> str | None:
    """Why there is no cache of such a set; None if there may be one."""
    if image_set.in_memory:
        return "which are in memory already"
    return "as it is not known which files they are in" if image_set.root is None else None


def remedy_for(place: Place) -> str:
    """Where its folder cannot be used."""
    return (
        "Set DATA.CACHE_PATH to a folder that can be written to" if place.stays else "DATA.CACHE=disk needs no memory"
    )


def count_threads(config: Config) -> int:
    return config.DATA.NUM_WORKERS or cores_per_process(1, torch.device("cpu"))


def place_of(config: Config, part: str, image_set: ImageSet) -> Place:
    """Where a cache of this set lies, or would."""
    data, root = config.DATA, os.fsencode(os.path.realpath(image_set.root))
    if data.CACHE == "ram":
        folder = MEMORY / f"halfstep-{os.getuid()}"
    else:
        folder = Path(data.CACHE_PATH or Path(config.SAVE) / "cache").expanduser()
    facts = {
        "files": hash_of_files(image_set, count_threads(config)),
        "channels": image_set.num_channels,
        **Recipe(data).facts,
    }
    name = f"{data.DATASET.replace('/', '-')}-{part}-{hashlib.sha256(root).hexdigest()[:16]}"
    return Place(folder, name, facts, len(image_set), stays=data.CACHE == "disk")


def hash_of_files(image_set: ImageSet, num_threads: int) -> str:
    """Of all paths, sizes and dates, in their order: another hash when any image was changed."""

    def describe(numbers: range) -> bytes:
        return os.fsencode("".join(f"{image_set.stamp(number)}\n" for number in numbers))

    count, digest = len(image_set), hashlib.sha256()
    with ThreadPoolExecutor(num_threads, "cache") as pool:
        for lines in pool.map(
            describe, [range(n, min(n + FILES_A_TASK, count)) for n in range(0, count, FILES_A_TASK)]
        ):
            digest.update(lines)
    return digest.hexdigest()


def open_finished(place: Place, warn: Callable[[str], None] = lambda line: None) -> CacheFile | None:
    """The finished cache, if there is one and it is right."""
    try:
        return CacheFile(place)
    except FileNotFoundError:
        return None
    except DamagedCache as error:
        warn(f"DATA.CACHE: {error}; it is made anew")
        return None


def _make(config: Config, place: Place, image_set: ImageSet, watch: Watch) -> CacheFile | None:
    """The cache, made here, or by another run while we waited for it."""
    place.folder.mkdir(mode=0o777 if place.stays else 0o700, parents=True, exist_ok=True)
    if not place.stays and place.folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{place.folder} belongs to another user")
    with _alone(place, watch):
        file = open_finished(place, watch.warn)
        if file is None:
            place.index.unlink(missing_ok=True)  # a damaged one
            for name in place.remove_older():
                watch.say(f"cache: removed {name}, made from other files or with other settings")
            build(place, image_set, Recipe(config.DATA), count_threads(config), watch)
            file = open_finished(place, watch.warn)
    return file


@contextlib.contextmanager
def _alone(place: Place, watch: Watch) -> Iterator[None]:
    """No other process makes a cache of this data set meanwhile."""
    has_said = False
    while True:
        with open(place.lock, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it even after kill -9
            except BlockingIOError:
                if not has_said:
                    watch.say(f"cache: another run makes one of {place.data_set}; waiting for it")
                has_said = True
                watch.check()
                time.sleep(SECONDS_BETWEEN_LOOKS)
                continue
            if not os.fstat(lock.fileno()).st_nlink:  # whoever had it removed it; the next one has another file
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    place.lock.unlink()
            return
