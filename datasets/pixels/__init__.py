"""Pixels: what image files become, and how a run stores, resizes and shows them.

Pixels have 8 bits here, read by decode.py; native/ has pixels with the values of their files.
A new kind is a subclass, a value of PIXEL_KINDS in configs/tables.py, and a case of kind_of_pixels in kinds.py.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from configs.schema import Config, Data
from configs.tables import OF_USERS
from datasets.pixels.rules import Images, PixelRules
from datasets.types import PriorFacts, Settled
from utils.distributed import Process
from utils.torch_internals import RESIZE_KERNELS

if TYPE_CHECKING:
    from datasets.pixels.survey import Survey

Resize = Callable[[np.ndarray, str, Tensor], None]  # image [H, W, C], interpolation, output [C, H', W']


@dataclass(frozen=True)
class Pixels(PixelRules):
    """The pixels of a run, uint8 [H, W, 1 or 3]."""

    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    dtype_in_batch: ClassVar[torch.dtype] = torch.uint8
    white: ClassVar[float] = 255  # the highest value in a batch
    name: ClassVar[str] = "8bit"  # the value of DATA.PIXELS in messages and in names of indexes
    own_endings: ClassVar[tuple[str, ...]] = ()  # endings of files that 8 bits cannot read
    own_files: ClassVar[str] = ""  # these files, in words
    measured: ClassVar[tuple[str, ...]] = ()  # settings that follow from the training images
    chosen: ClassVar[tuple[str, ...]] = ()  # settings that a run with pretrained weights may choose without a warning
    shown_as: ClassVar[str] = ""  # channels and values that pictures show, in words
    channels_shown: ClassVar[list[int] | slice] = slice(None)

    @classmethod
    def of(cls, data: Data) -> Self:
        exif = data.EXIF or ("apply" if data.DATASET in OF_USERS else "ignore")
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

    def identity(self) -> dict[str, int | bool | str | tuple[int, ...]]:
        """Return what the pixels of a file depend on, as plain values. A cache is valid for equal ones."""
        return {each.name: getattr(self, each.name) for each in fields(PixelRules)}

    def measure(
        self, config: Config, prior: PriorFacts, process: Process, train: Images | None
    ) -> tuple[list[Settled], Self, Iterable[str]]:
        """Measure what these pixels depend on: return the settings that follow, the pixels, and notes. Collective."""
        return [], self, ()

    def survey(self, count: int) -> "Survey":
        """Return an empty survey of the values of this many images, for a row of -check."""
        from datasets.pixels.survey import Survey

        return Survey()

    # --- the images of batches, and pictures ---

    def resize(self) -> Resize:
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

    def pictures(self, images: Tensor) -> Sequence[np.ndarray]:
        """Return images of a batch as uint8 [H, W, 1 or 3]."""
        return self.to_bytes(images).permute(0, 2, 3, 1).cpu().numpy()

    def for_card(self) -> tuple[str, str]:
        """Return Python code that prepares an image as a run does, and a sentence about it, for a model card."""
        from datasets.pixels.card import for_card

        return for_card(self)


def resize(image: np.ndarray, interpolation: str, out: Tensor) -> None:
    """Resize uint8 [H, W, C] with antialiasing into `out` [C, H', W'].

    torch's kernels are five times as fast as Pillow and need no copy. Single values differ by 1 or 2, because the
    weights of the kernels have 16 bits.
    """
    if interpolation in RESIZE_KERNELS:
        kernel, source = RESIZE_KERNELS[interpolation], torch.from_numpy(image).permute(2, 0, 1)[None]
        (height, width, channels), (new_height, new_width) = image.shape, out.shape[1:]
        if height - new_height > max(0, 2 * (width - new_width)) and pillow_resizes_height_first():
            lower = torch.empty((1, new_height, width, channels), dtype=torch.uint8).permute(0, 3, 1, 2)
            kernel(source, (new_height, width), False, None, None, out=lower)
            source = lower
        kernel(source, (new_height, new_width), False, None, None, out=out[None])
        return
    picture = Image.fromarray(image if image.shape[2] > 1 else image[:, :, 0])
    resized = np.array(picture.resize((out.shape[2], out.shape[1]), Image.Resampling[interpolation.upper()]))
    out.copy_(torch.from_numpy(resized.reshape(*out.shape[1:], -1)).permute(2, 0, 1))


@functools.cache
def pillow_resizes_height_first() -> bool:
    """Return whether Pillow resizes the height before the width if the height shrinks by over twice as many pixels.

    Pillow 13 does, and earlier versions never do. The order matters, because overshoot is clipped after the first pass.
    """
    picture, bicubic = Image.fromarray(np.array([[0, 255], [255, 0], [255, 255]], np.uint8)), Image.Resampling.BICUBIC
    return picture.resize((3, 2), bicubic) == picture.resize((2, 2), bicubic).resize((3, 2), bicubic)
