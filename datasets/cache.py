"""DATA.CACHE: decodes each image once, and then reads its pixels from a file that is mapped into memory.

A cache belongs to a folder of images and to the settings that decide their pixels. It has an entry for an image,
whatever part the image is in, known by the path, size and date of its file. Images that are new or changed are added at
the end, so another fold or a new photo costs only what is new.

Tar shards are no replacement: they hold encoded images, and the cache is fast because it has nothing to decode.
"""

import contextlib
import functools
import hashlib
import json
import math
import mmap
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import Config
from datasets.image_set import ImageReadError, ImageSet
from datasets.index import ENDING, Index, IndexBuilder, caches_folder, open_index
from datasets.passes import read_each
from datasets.pixels import Pixels
from datasets.types import CacheProgress
from utils.errors import StoppedBySignal
from utils.files import check_writable, free_bytes, locked, sync, without_waiting
from utils.host import count_cores
from utils.text import counted, format_bytes, format_bytes_apart

VERSION = 8  # version of the format of both files and of the key
# The stamp, the place and the size of each image; a stamp has two numbers. An unreadable image has height 0, and its
# width is the length of an error message.
COLUMNS = {"stamp": "<u8", "start": "<u8", "height": "<u4", "width": "<u4"}
NONE = -1  # the place of an image without an entry
# Older versions of Python do not define MAP_NORESERVE.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
NUM_SAMPLED = 64  # number of images from which the total size is estimated
IMAGES_AHEAD_PER_THREAD = 2  # number of images that each thread decodes ahead of the writer
FILES_PER_TASK = 4096
REMEDY = "Set DATA.CACHE_PATH to a writable folder with enough space; DATA.CACHE=256 needs less space"

Missing = dict[tuple[int, int], tuple[ImageSet, int]]  # {stamp: an image without an entry, as its set and number}
Images = list[tuple[ImageSet, int]]  # each with its set and number


# --- the files of a cache ---


class CacheLocation(NamedTuple):
    """The files of a cache."""

    folder: Path
    data_set: str  # name of the data set and its folder; only the newest cache of this name is kept
    key: str  # hash of the settings that decide the pixels

    @property
    def data(self) -> Path:
        return self.folder / f"{self.data_set}-{self.key}.data"

    @property
    def index(self) -> Path:
        return self.data.with_suffix(ENDING)

    def remove(self) -> None:
        for path in (self.index, self.data):
            path.unlink(missing_ok=True)


def locate_cache(config: Config, image_set: ImageSet) -> CacheLocation:
    """Return the location of the cache of this set's folder, which need not exist."""
    root = hashlib.sha256(os.fsencode(os.path.realpath(image_set.root))).hexdigest()[:16]
    key = {"version": VERSION, "pixels": image_set.pixels.identity()}
    if side := config.DATA.cache_side:  # the interpolation matters only if images are resized
        key |= {"side": side, "interpolation": config.DATA.INTERPOLATION}
    name = f"{config.DATA.DATASET.replace('/', '-')}-{root}"
    return CacheLocation(caches_folder(config), name, hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16])


def stamps_of(image_set: ImageSet, num_threads: int) -> np.ndarray:
    """Return uint64 [N, 2]: a hash of path, size and date of each image. It changes if the image changes."""

    def hash_files(first: int) -> bytes:
        numbers = range(first, min(first + FILES_PER_TASK, len(image_set)))
        stamps = (image_set.storage.stamp(image_set.row(number)) for number in numbers)
        return b"".join(hashlib.blake2b(os.fsencode(stamp), digest_size=16).digest() for stamp in stamps)

    with ThreadPoolExecutor(num_threads, "cache") as pool:
        hashes = b"".join(pool.map(hash_files, range(0, len(image_set), FILES_PER_TASK)))
    return np.frombuffer(hashes, "<u8").reshape(-1, 2)


def count_threads(config: Config) -> int:
    return config.DATA.NUM_WORKERS or count_cores()


class CacheFile:
    """A cache, mapped into memory: all processes of a machine share its pages."""

    def __init__(self, location: CacheLocation, begun: str = ""):
        """Open the cache. Raise FileNotFoundError if it is missing or damaged, or not the one that was `begun` so."""
        self.location, index = location, open_index(location.index)
        # A process that was killed while it added images may have left more bytes, which the index does not know.
        if index is None or location.data.stat().st_size < index.facts["size"]:
            raise FileNotFoundError(location.index)
        self.begun = index.facts["begun"]
        if begun not in ("", self.begun):
            raise FileNotFoundError(location.index)
        self.index, self.size = index, index.facts["size"]
        self.starts, self.heights, self.widths = (index.column(name) for name in ("start", "height", "width"))
        self.num_channels, self.dtype = index.facts["channels"], np.dtype(index.facts["type"])
        with open(location.data, "rb", opener=without_waiting) as file:
            # The map is private and writable, because torch warns about read-only arrays; nothing writes to it. Without
            # MAP_NORESERVE, Linux refuses a private map that is larger than the memory.
            flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self.data = np.frombuffer(mmap.mmap(file.fileno(), self.size, flags=flags, prot=access), np.uint8)

    @functools.cached_property
    def _by_stamp(self) -> np.ndarray:
        """Return the entries in the order of their stamps."""
        return np.argsort(self.index.rows("stamp", len(self.starts))[:, 0], kind="stable")

    def places(self, stamps: np.ndarray) -> np.ndarray:
        """Return int64 [N]: the entry of each stamp [N, 2], or NONE."""
        known = self.index.rows("stamp", len(self.starts))
        if not len(known):
            return np.full(len(stamps), NONE)
        nearest = np.searchsorted(known[:, 0], stamps[:, 0], sorter=self._by_stamp)
        places = self._by_stamp[np.minimum(nearest, len(known) - 1)]
        return np.where((known[places] == stamps).all(1), places, NONE)

    def num_bytes(self, places: np.ndarray) -> int:
        """Return how many bytes these entries take."""
        ends = np.append(self.starts[1:], self.size)
        return int((ends - self.starts)[places].sum())

    def read(self, place: int) -> np.ndarray:
        """Return the image of an entry like ImageSet.read."""
        start, height, width = (int(column[place]) for column in (self.starts, self.heights, self.widths))
        if height == 0:
            raise ImageReadError(os.fsdecode(self.data[start : start + width].tobytes()))
        shape = height, width, self.num_channels
        return self.data[start : start + math.prod(shape) * self.dtype.itemsize].view(self.dtype).reshape(shape)

    def __reduce__(self):
        return CacheFile, (self.location, self.begun)


def open_cache(location: CacheLocation) -> CacheFile | None:
    """Return the cache, or None if it is missing or damaged."""
    try:
        return CacheFile(location)
    except FileNotFoundError:
        return None


def write_cache(
    location: CacheLocation,
    pixels: Pixels,
    known: Index | None,
    stamps: np.ndarray,
    images: Iterable[tuple[int, int, bytes | np.ndarray]],
) -> None:
    """Add images (height, width, content) to the file, and then write the index, which makes them count.

    `known`: the index of a cache to continue; None: begin a new one. The caller must hold the lock.
    """
    builder, end, begun = IndexBuilder(COLUMNS), 0, secrets.token_hex(8)
    if known is None:
        location.remove()  # not overwritten, because another run may have mapped the old cache
    else:
        end, begun = known.facts["size"], known.facts["begun"]
        for name in COLUMNS:
            builder.add(name, known.column(name))
    try:
        with open(location.data, "ab") as file:
            file.truncate(end)
            for stamp, (height, width, content) in zip(stamps, images, strict=True):
                builder.add("stamp", stamp)
                for name, value in (("start", end), ("height", height), ("width", width)):
                    builder.add(name, [value])
                # Types of several bytes must be aligned to be read in place, also after the text of an error.
                end += file.write(content)
                end += file.write(bytes(-end % pixels.dtype.itemsize))
            sync(file)
        facts = {"begun": begun, "size": end, "channels": pixels.num_channels, "type": pixels.dtype.name}
        builder.finish(facts).save(location.index)
    except BaseException:
        if known is None:
            location.remove()
        else:
            os.truncate(location.data, known.facts["size"])  # the earlier images stay
        raise


# --- the sets of a run ---


def cache_image_sets(
    config: Config, image_sets: tuple[ImageSet | None, ImageSet], progress: CacheProgress
) -> tuple[ImageSet | None, ImageSet]:
    """Return the training and validation set, read from the cache if DATA.CACHE is on. First add missing images."""
    if config.DATA.CACHE == "none":
        return image_sets
    short_side = math.floor(min(config.DATA.shape) / config.DATA.CROP_PCT)
    if (side := config.DATA.cache_side) and side < short_side:
        progress.warn(f"DATA.CACHE is {side}; evaluation will enlarge the cached images to {short_side}")
    train, val = image_sets
    has_all = train is not None  # an evaluation has only some of the images
    if train is not None and train.root == val.root and train.root is not None:
        train, val = _cached(config, {"training": train, "validation": val}, has_all, progress)
    else:
        if train is not None:
            (train,) = _cached(config, {"training": train}, has_all, progress)
        (val,) = _cached(config, {"validation": val}, has_all, progress)
    return train, val


def _cached(config: Config, parts: dict[str, ImageSet], has_all: bool, progress: CacheProgress) -> list[ImageSet]:
    """Return these parts of one folder, read from its cache. `has_all`: whether they are all images of the folder."""
    names = " and ".join(parts)
    sets, first = list(parts.values()), next(iter(parts.values()))
    if first.root is None:
        reason = "which are in memory already" if first.storage.in_memory else "whose files are not known"
        progress.say(f"cache: not used for the {names} images of {config.DATA.DATASET}, {reason}")
        return sets
    location, file = locate_cache(config, first), None
    try:
        stamps = [stamps_of(part, count_threads(config)) for part in sets]
        file = open_cache(location)
        if missing := find_missing(file, sets, stamps):
            file = None
            if progress.is_check:
                check_writable(location.folder)
                progress.say(f"cache: a run writes {check_space(config, location, missing)}")
            elif progress.may_build:
                file = build_cache(config, location, sets, stamps, has_all, progress)
    except OSError as error:
        progress.warn(f"DATA.CACHE: {error}; continuing without a cache of the {names} images. {REMEDY}")
        file = None
    if file is None:
        return sets
    counts = " and ".join(counted(len(part), f"{name} image") for name, part in parts.items())
    progress.say(f"cache: {counts}, {format_bytes(file.size)}, in {location.data}")
    return [
        replace(part, read_cached=CachedImages(part, file, file.places(of_part)).read)
        for part, of_part in zip(sets, stamps, strict=True)
    ]


def find_missing(file: CacheFile | None, sets: Sequence[ImageSet], stamps: Sequence[np.ndarray]) -> Missing:
    """Return the images that have no entry, each once."""
    missing: Missing = {}
    for image_set, of_set in zip(sets, stamps, strict=True):
        places = np.full(len(of_set), NONE) if file is None else file.places(of_set)
        for number in np.flatnonzero(places == NONE).tolist():
            missing.setdefault(tuple(of_set[number].tolist()), (image_set, number))
    return missing


class CachedImages:
    """The images of a part whose pixels are in a cache."""

    def __init__(self, part: ImageSet, file: CacheFile, places: np.ndarray):
        """`places`: the entry of each image of the part."""
        self.file = file
        self._places = np.zeros(len(part.storage), np.uint32)  # the entry of each row
        self._places[slice(None) if part.rows is None else part.rows] = places

    def read(self, row: int) -> np.ndarray:
        """Return the image of a row of the storage like ImageSet.read."""
        return self.file.read(int(self._places[row]))


def build_cache(
    config: Config,
    location: CacheLocation,
    sets: Sequence[ImageSet],
    stamps: Sequence[np.ndarray],
    has_all: bool,
    progress: CacheProgress,
) -> CacheFile | None:
    """Add the missing images, and return the cache, or None if another run is adding some. Raise OSError if it cannot
    be written."""
    location.folder.mkdir(parents=True, exist_ok=True)
    with locked(location.folder / f"{location.data_set}.lock") as lock:
        if lock is None:
            progress.say(f"cache: another run is building {location.data_set}; this run reads the image files")
            return None
        try:
            file = open_cache(location)
            if file and has_all and _is_mostly_unused(file, stamps):
                file = None
                progress.say(f"cache: removed {location.data.name}, most of whose images have changed or are gone")
            if not (missing := find_missing(file, sets, stamps)):  # another run has just added them
                return file
            for data in {*location.folder.glob(f"{location.data_set}-{'[0-9a-f]' * 16}.data")} - {location.data}:
                # A run that has opened an older cache can still read it.
                location._replace(key=data.stem[-16:]).remove()
                progress.say(f"cache: removed {data.name}, which was built with other settings")
            progress.say(f"cache: writing {check_space(config, location, missing)}")
            with contextlib.closing(_decoded(config, list(missing.values()), progress)) as images:
                write_cache(location, sets[0].pixels, file and file.index, np.array([*missing], "<u8"), images)
        finally:
            Path(lock.name).unlink(missing_ok=True)
    return open_cache(location)


def _is_mostly_unused(file: CacheFile, stamps: Sequence[np.ndarray]) -> bool:
    """Return whether most bytes are of images other than these, so that it is better to begin again."""
    places = np.unique(np.concatenate([file.places(of_set) for of_set in stamps]))
    return 2 * file.num_bytes(places[places != NONE]) < file.size


def _decoded(config: Config, images: Images, progress: CacheProgress) -> Iterator[tuple[int, int, bytes | np.ndarray]]:
    """Yield height, width and content of each image in order, with a progress bar."""
    encoding = functools.partial(encode, config, images)
    numbers = range(len(images))
    for _, image in read_each(numbers, encoding, "cache", count_threads(config), IMAGES_AHEAD_PER_THREAD):
        if progress.signal():
            raise StoppedBySignal(progress.signal(), "while building the image cache")
        yield image


def encode(config: Config, images: Images, number: int) -> tuple[int, int, bytes | np.ndarray]:
    """Return the height, width and content that the cache stores for an image."""
    image_set, index = images[number]
    try:
        pixels = image_set.read(index)
    except ImageReadError as error:
        reason = os.fsencode(str(error))
        return 0, len(reason), reason
    height, width, _ = pixels.shape
    side, short = config.DATA.cache_side, min(height, width)
    if side is not None and short > side:
        size = side * height // short, side * width // short
        pixels = image_set.pixels.shrunk(pixels, size, config.DATA.INTERPOLATION)
    return *pixels.shape[:2], np.ascontiguousarray(pixels)


def check_space(config: Config, location: CacheLocation, images: Missing) -> str:
    """Return the size of these images in the cache and the free space as text. Raise OSError if they do not fit."""
    needed, free = estimate_bytes(config, list(images.values())), free_bytes(location.folder)
    needs, has = format_bytes_apart(needed, free)
    sizes = f"{counted(len(images), 'image')}, about {needs} in {location.folder}, where {has} are free"
    if needed > free:
        raise OSError(f"there is not enough space for {sizes}")
    return sizes


def estimate_bytes(config: Config, images: Images) -> int:
    """Return the estimated size of images in the cache, from a sample of them."""
    sample = np.linspace(0, len(images) - 1, min(len(images), NUM_SAMPLED)).astype(int).tolist()

    def size_of(number: int) -> int:
        return memoryview(encode(config, images, number)[2]).nbytes

    sizes = read_each(sample, size_of, "", count_threads(config))
    return int(np.mean([size for _, size in sizes]) * len(images))
