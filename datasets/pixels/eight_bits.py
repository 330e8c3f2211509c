"""Pixels of 8 bits, grey or coloured: those of most runs. Other kinds of pixels are subclasses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.pixels.resize import resize
from datasets.pixels.rules import Images, PixelRules

# Data sets of a user's own photos: EXIF orientation is applied by default. Published scores on other sets ignore it.
UPRIGHT = ("imagefolder", "images", "csv", "shards", "parquet")
Resize = Callable[[np.ndarray, str, Tensor], None]  # image [H, W, C], interpolation, output [C, H', W']


class Survey:
    """The values of a sample of images, for a row of -check. 8 bits need no such row."""

    def add(self, number: int, pixels: np.ndarray) -> None:
        """Note the values of an image."""

    def describe(self, name: Callable[[int], str]) -> list[str]:
        """Return a line about the images, and lines about what is doubtful. `name(number)` names an image."""
        return []


@dataclass(frozen=True)
class Pixels(PixelRules):
    """The pixels of a run, uint8 [H, W, 1 or 3]."""

    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    dtype_in_batch: ClassVar[torch.dtype] = torch.uint8
    white: ClassVar[float] = 255  # the highest value in a batch
    channel_files: ClassVar[str | None] = None  # DATA.CHANNEL_FILES, if each channel of an image has a file of its own
    own_endings: ClassVar[tuple[str, ...]] = ()  # endings of files that 8 bits cannot read
    of_index: ClassVar[str] = ""  # part of the name of an index of shards, whose samples depend on the endings
    measured_by: ClassVar[str] = ""  # file and function of datasets/ that finishes images, if these pixels need it
    measured: ClassVar[tuple[str, ...]] = ()  # settings that follow from the training images
    chosen: ClassVar[tuple[str, ...]] = ()  # settings that a run with pretrained weights may choose without a warning
    shown_as: ClassVar[str] = ""  # channels and values that pictures show, in words
    channels_shown: ClassVar[list[int] | slice] = slice(None)

    @classmethod
    def of(cls, data: Data) -> Self:
        exif = data.EXIF or ("apply" if data.DATASET in UPRIGHT else "ignore")
        mean = data.IMAGENET_MEAN[: data.IMAGE_CHANNELS] * (3 // data.IMAGE_CHANNELS)
        return cls(data.IMAGE_CHANNELS, exif == "apply", tuple(cls.levels(mean)), data.MAX_PIXELS)

    @classmethod
    def levels(cls, mean: Sequence[float]) -> Sequence[float]:
        """Return values from 0 to 1 as values in a batch."""
        return [min(max(round(255 * each), 0), 255) for each in mean]

    # --- files ---

    def decode(self, data: bytes) -> np.ndarray:
        """Return the pixels of an image file as [H, W, channels]. Raise ImageReadError if it cannot be read."""
        from datasets.pixels.decode import decode

        return decode(data, self)

    def kinds(self, read: Callable[[], bytes]) -> list[str]:
        """Return the unusual properties of the file that `read` returns, as -check prints them."""
        from datasets.pixels.decode import kinds_of

        return kinds_of(read, self)

    def look_into(self, images: Images, is_remote: bool) -> tuple[Self, list[str]]:
        """Look into a few files. Return their pixels, and a warning if these would lose most levels of the files."""
        from datasets.pixels.decode import warn_of_lost_levels

        return self, [] if is_remote else warn_of_lost_levels(images)  # a look would download a whole tar

    def identity(self) -> dict[str, int | bool | str | None | tuple[int, ...]]:
        """Return what the pixels of a file depend on, as plain values. A cache is valid for equal ones."""
        return {each.name: getattr(self, each.name) for each in fields(PixelRules)}

    def survey(self, count: int) -> Survey:
        """Return an empty survey of this many images."""
        return Survey()

    # --- the images of batches, and pictures ---

    def resize(self, data: Data) -> Resize:
        """Return the function that resizes a decoded image into an image of a batch."""
        return resize

    def shrunk(self, pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
        """Return an image resized to a height and width, for a cache."""
        smaller = np.empty((*size, pixels.shape[2]), np.uint8)
        resize(pixels, interpolation, torch.from_numpy(smaller).permute(2, 0, 1))
        return smaller

    def augmentation(self, config: Config) -> Callable[[Tensor, Random], None]:
        """Return the function that changes an image of a batch in place, for settings that augment."""
        from datasets.transforms.augment import Augmentation

        return Augmentation(config)

    def shown(self, pixels: np.ndarray) -> np.ndarray:
        """Return a decoded image as uint8 [H, W, 1 or 3] for pictures."""
        return pixels

    def to_bytes(self, images: Tensor) -> Tensor:
        """Return images of a batch as uint8 [B, 1 or 3, H, W] for pictures."""
        return (images * (255 / self.white)).round().clamp(0, 255).to(torch.uint8)[:, self.channels_shown]

    def for_card(self) -> tuple[str, str]:
        """Return Python code that prepares an image as a run does, and a sentence about it, for a model card."""
        from datasets.pixels.card import code_of, sentence_of

        return code_of(self), sentence_of(self)
