"""Filling a cache: images read, shrunk and encoded by threads, and written in the order of the set."""

import contextlib
import io
import itertools
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from configs.schema import Data
from datasets.cache.file import JPEG, PIXELS, UNREADABLE, CacheWriter, Place, Prepared
from datasets.transforms.crop import resize
from datasets.transforms.decode import simplejpeg
from datasets.types import ImageReadError, ImageSet
from utils.errors import StoppedBySignal
from utils.host import free_host_memory
from utils.units import format_bytes

NUM_SAMPLED = 64  # images from which the size of all is estimated
LONGEST_JPEG_SIDE = 65_500  # of libjpeg
AHEAD_PER_THREAD = 2  # images that are prepared before they can be written
SECONDS_BETWEEN_LINES = 1.0  # of the log, where no bar shows how far it is


class CacheFailed(Exception):
    """The cache cannot be made; the message says why, with the numbers."""


@dataclass(frozen=True)
class Watch:
    """Whom a process tells what it does about the cache, and who tells it to stop."""

    say: Callable[[str], None]
    warn: Callable[[str], None]
    signal: Callable[[], int] = lambda: 0  # the number of the signal that tells it to stop; 0: none
    may_build: bool = True

    def check(self) -> None:
        if self.signal():
            raise StoppedBySignal(self.signal(), "while the cache of the images was made")


class Recipe:
    """What is kept of an image."""

    def __init__(self, data: Data):
        self.form, self.side = data.CACHE_FORM, data.CACHE_SIDE
        self.quality, self.interpolation = data.CACHE_QUALITY, data.INTERPOLATION

    @property
    def facts(self) -> dict:
        """What the content of a cache follows from; settings without effect are left out."""
        shrunk = {"side": self.side, "interpolation": self.interpolation} if self.side else {}
        return {"form": self.form, **shrunk, **({"quality": self.quality} if self.form == "jpeg" else {})}

    def prepare(self, image_set: ImageSet, index: int) -> Prepared:
        try:
            pixels = self._shrink(image_set.read(index))
        except ImageReadError as error:
            return Prepared(UNREADABLE, 0, 0, os.fsencode(str(error)))
        height, width, _ = pixels.shape
        if self.form == "jpeg" and max(height, width) <= LONGEST_JPEG_SIDE:
            return Prepared(JPEG, height, width, encode(pixels, self.quality))
        return Prepared(PIXELS, height, width, np.ascontiguousarray(pixels))

    def _shrink(self, pixels: np.ndarray) -> np.ndarray:
        height, width, num_channels = pixels.shape
        short = min(height, width)
        if self.side is None or short <= self.side:
            return pixels
        smaller = torch.empty(
            (self.side * height // short, self.side * width // short, num_channels), dtype=torch.uint8
        )
        resize(pixels, self.interpolation, smaller.permute(2, 0, 1))
        return smaller.numpy()


def encode(pixels: np.ndarray, quality: int) -> bytes:
    """uint8 [H, W, 1 or 3] as a JPEG with colours at half the resolution, as cameras make them."""
    is_grey = pixels.shape[2] == 1
    if simplejpeg:
        colours, sampling = ("GRAY", "Gray") if is_grey else ("RGB", "420")
        return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, colours, sampling)
    content = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if is_grey else pixels).save(content, "JPEG", quality=quality, subsampling="4:2:0")
    return content.getvalue()


def build(place: Place, image_set: ImageSet, recipe: Recipe, num_threads: int, watch: Watch) -> None:
    """Make or finish the cache at `place`. CacheFailed: it cannot be made, and nothing is left of it."""
    with contextlib.closing(CacheWriter(place)) as writer, ThreadPoolExecutor(num_threads, "cache") as pool:
        try:
            _check_room(image_set, recipe, writer, pool, watch)
            numbers = range(writer.num_done, place.num_images)
            started = (pool.submit(recipe.prepare, image_set, number) for number in numbers)
            waiting = deque(itertools.islice(started, num_threads * AHEAD_PER_THREAD))
            for _ in _shown(numbers, watch):
                watch.check()
                writer.add(waiting.popleft().result())
                waiting.extend(itertools.islice(started, 1))
            writer.finish()
        except OSError as error:
            told = f"{error}; {format_bytes(writer.end)} written, {format_bytes(free_bytes(place))} free"
            place.remove()
            raise CacheFailed(f"{place.data} cannot be written ({told})") from error
        except BaseException as error:
            # What was told to stop goes on at the next start; but memory would be lost until then.
            if isinstance(error, CacheFailed) or not place.stays:
                place.remove()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _check_room(
    image_set: ImageSet, recipe: Recipe, writer: CacheWriter, pool: ThreadPoolExecutor, watch: Watch
) -> None:
    """Say how large the cache will be; CacheFailed when that is more than there is."""
    place, num_images, num_done = writer.place, writer.place.num_images, writer.num_done
    needed = estimate(image_set, recipe, num_images - num_done, pool)
    free = free_bytes(place)
    told = f"about {format_bytes(needed)} in {place.folder}, where {format_bytes(free)} are free"
    if needed > free:
        raise CacheFailed(f"there is no room for {num_images - num_done} images, {told}")
    if num_done:
        watch.say(f"cache: {num_done} of {num_images} images are there from an earlier start; the rest takes {told}")
    else:
        watch.say(f"cache: {num_images} images will take {told}")


def estimate(image_set: ImageSet, recipe: Recipe, count: int, pool: ThreadPoolExecutor) -> int:
    """Bytes that so many images of the set will take."""
    sample = np.linspace(0, len(image_set) - 1, min(len(image_set), NUM_SAMPLED)).astype(int).tolist()
    lengths = pool.map(lambda index: memoryview(recipe.prepare(image_set, index).content).nbytes, sample)
    return int(np.mean(list(lengths)) * count)


def free_bytes(place: Place) -> int:
    """Bytes that may still be written there. What lies in memory counts against the machine's and the container's."""
    free = shutil.disk_usage(place.folder).free
    return free if place.stays else min(free, free_host_memory())


def _shown(numbers: range, watch: Watch) -> Iterator[int]:
    """The numbers, with a bar on a terminal, and elsewhere with a line for every tenth of the images, but at most one a second."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(
            numbers, "cache", numbers.stop, initial=numbers.start, unit=" images", leave=False, dynamic_ncols=True
        )
        return
    said = time.monotonic()
    for number in numbers:
        is_tenth = number > numbers.start and number * 10 // numbers.stop > (number - 1) * 10 // numbers.stop
        if is_tenth and time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            watch.say(f"cache: {number} of {numbers.stop} images")
        yield number
