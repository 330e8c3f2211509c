"""Building a cache: threads read, shrink and encode the images, which are written in the order of the set."""

import contextlib
import io
import itertools
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from configs.schema import Data
from datasets.cache.file import JPEG, PIXELS, UNREADABLE, CacheLocation, CacheWriter, StoredImage
from datasets.transforms.crop import resize
from datasets.transforms.decode import simplejpeg
from datasets.types import ImageReadError, ImageSet
from utils.bar import Bar, is_terminal
from utils.errors import StoppedBySignal
from utils.host import free_host_memory
from utils.text import counted, format_bytes

NUM_SAMPLED = 64  # images from which the size of all is estimated
MAX_JPEG_SIDE = 65_500  # libjpeg's limit
IMAGES_AHEAD_PER_THREAD = 2  # encoded before they can be written
SECONDS_BETWEEN_LINES = 1.0  # in the log, where there is no progress bar


class CacheError(Exception):
    """The cache cannot be built; the message says why, with the numbers."""


@dataclass(frozen=True)
class CacheProgress:
    """Callbacks for progress and cancellation."""

    say: Callable[[str], None]
    warn: Callable[[str], None]
    signal: Callable[[], int] = lambda: 0  # the number of the signal to stop on; 0: none has arrived
    may_build: bool = True

    def check(self) -> None:
        """Raise StoppedBySignal if a signal has arrived."""
        if self.signal():
            raise StoppedBySignal(self.signal(), "while building the image cache")


class CacheEncoder:
    """Turns an image into what the cache stores of it."""

    def __init__(self, data: Data):
        self.form, self.side = data.CACHE_FORM, data.CACHE_SIDE
        self.quality, self.interpolation = data.CACHE_QUALITY, data.INTERPOLATION

    @property
    def key(self) -> dict:
        """The settings that the stored images depend on; those without effect are left out."""
        shrunk = {"side": self.side, "interpolation": self.interpolation} if self.side else {}
        return {"form": self.form, **shrunk, **({"quality": self.quality} if self.form == "jpeg" else {})}

    def encode(self, image_set: ImageSet, index: int) -> StoredImage:
        try:
            pixels = self._shrink(image_set.read(index))
        except ImageReadError as error:
            return StoredImage(UNREADABLE, 0, 0, os.fsencode(str(error)))
        height, width, _ = pixels.shape
        if self.form == "jpeg" and max(height, width) <= MAX_JPEG_SIDE:
            return StoredImage(JPEG, height, width, encode_jpeg(pixels, self.quality))
        return StoredImage(PIXELS, height, width, np.ascontiguousarray(pixels))

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


def encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """uint8 [H, W, 1 or 3] as a JPEG with chroma at half the resolution, as cameras write it."""
    is_grey = pixels.shape[2] == 1
    if simplejpeg:
        colours, sampling = ("GRAY", "Gray") if is_grey else ("RGB", "420")
        return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, colours, sampling)
    content = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if is_grey else pixels).save(content, "JPEG", quality=quality, subsampling="4:2:0")
    return content.getvalue()


def build_cache(
    location: CacheLocation, image_set: ImageSet, encoder: CacheEncoder, num_threads: int, progress: CacheProgress
) -> None:
    """Build or complete the cache. CacheError: that is impossible, and its files are removed."""
    with contextlib.closing(CacheWriter(location)) as writer, ThreadPoolExecutor(num_threads, "cache") as pool:
        try:
            _check_free_space(image_set, encoder, writer, pool, progress)
            numbers = range(writer.num_done, location.num_images)
            started = (pool.submit(encoder.encode, image_set, number) for number in numbers)
            waiting = deque(itertools.islice(started, num_threads * IMAGES_AHEAD_PER_THREAD))
            for _ in _with_progress(numbers, progress):
                progress.check()
                writer.add(waiting.popleft().result())
                waiting.extend(itertools.islice(started, 1))
            writer.finish()
        except OSError as error:
            sizes = f"{format_bytes(writer.end)} written, {format_bytes(free_bytes(location))} free"
            location.remove()
            raise CacheError(f"{location.data} cannot be written ({error}; {sizes})") from error
        except BaseException as error:
            # The next start continues a stopped build; but one in memory would take up that memory until then.
            if isinstance(error, CacheError) or not location.persistent:
                location.remove()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _check_free_space(
    image_set: ImageSet, encoder: CacheEncoder, writer: CacheWriter, pool: ThreadPoolExecutor, progress: CacheProgress
) -> None:
    """Report how large the cache will be; CacheError when that does not fit."""
    location, num_done = writer.location, writer.num_done
    num_left = location.num_images - num_done
    needed, free = estimate_bytes(image_set, encoder, num_left, pool), free_bytes(location)
    sizes = f"about {format_bytes(needed)} in {location.folder}, where {format_bytes(free)} are free"
    if needed > free:
        raise CacheError(f"there is no room for {counted(num_left, 'image')}, {sizes}")
    before = f"; {num_done} of {location.num_images} were written by an earlier start" if num_done else ""
    progress.say(f"cache: writing {counted(num_left, 'image')}, {sizes}{before}")


def estimate_bytes(image_set: ImageSet, encoder: CacheEncoder, count: int, pool: ThreadPoolExecutor) -> int:
    """The size of `count` images of the set in the cache, from a sample."""
    sample = np.linspace(0, len(image_set) - 1, min(len(image_set), NUM_SAMPLED)).astype(int).tolist()
    lengths = pool.map(lambda index: memoryview(encoder.encode(image_set, index).content).nbytes, sample)
    return int(np.mean(list(lengths)) * count)


def free_bytes(location: CacheLocation) -> int:
    """Bytes that can still be written there. In memory, the limits of machine and container count too."""
    free = shutil.disk_usage(location.folder).free
    return free if location.persistent else min(free, free_host_memory())


def _with_progress(numbers: range, progress: CacheProgress) -> Iterator[int]:
    """The numbers, with a bar on a terminal, elsewhere with a line per tenth of the images, at most one a second."""
    if is_terminal():
        with Bar("cache", numbers.stop, numbers.start) as bar:
            for number in numbers:
                yield number
                bar.move()
        return
    last = time.monotonic()
    for number in numbers:
        is_tenth = number > numbers.start and number * 10 // numbers.stop > (number - 1) * 10 // numbers.stop
        if is_tenth and time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            progress.say(f"cache: {number} of {counted(numbers.stop, 'image')}")
        yield number
