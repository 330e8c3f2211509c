"""Crop images to the shape that the model takes as input. Crops are uint8 on the CPU and normalized on the device."""

import functools
import math
import random
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from configs.schema import Config, Data, Shape
from datasets.pixels import Pixels
from datasets.pixels.kinds import pixels_of
from datasets.pixels.rules import ImageReadError

T = TypeVar("T")


class BySize(Generic[T]):
    """A set of objects, one for each size of training images."""

    def __init__(self, config: Config, make: Callable[[Config], T]):
        """Call `make` for each size, with settings in which IMAGE_SIZE is that size."""
        self._starts = config.train_shapes
        shapes = set(self._starts.values())
        self._made = {shape: make(config.changed("DATA", IMAGE_SIZE=shape.size)) for shape in shapes}

    def at(self, epoch: int) -> T:
        """Return the object for an epoch, counted from 0."""
        return self._made[self._starts[max(start for start in self._starts if start <= epoch)]]


NUM_TRIES = 10  # attempts to draw a crop that fits into the image, as in torchvision


class TrainTransform:
    """A random crop (DATA.CROP_SCALE, DATA.CROP_RATIO), resize, flip (DATA.HFLIP, DATA.VFLIP) and augmentation."""

    def __init__(self, config: Config, pixels: Pixels | None = None):
        """`pixels`: of the images; None: those of the settings."""
        self.data, self.augment = config.DATA, None
        self.cut = self.resized_crop
        if self.data.TRAIN_CROP == "simple":
            from datasets.transforms.simple_crop import crop_of_resized

            self.cut = functools.partial(crop_of_resized, self)
        pixels = pixels or pixels_of(self.data)
        self.resize = pixels.resize()
        if config.TRAIN.augments:
            self.augment = pixels.augmentation(config)

    def __call__(self, image: np.ndarray, rng: random.Random, out: Tensor) -> None:
        """Transform an image [H, W, C] as `rng` draws, and write it to `out`, [C, *Data.shape]: of dtype_in_batch."""
        self.cut(image, rng, out)
        if rng.random() < self.data.HFLIP:
            out.copy_(out.flip(2))
        if self.data.VFLIP and rng.random() < self.data.VFLIP:
            out.copy_(out.flip(1))
        if self.augment:
            self.augment(out, rng)

    def resized_crop(self, image: np.ndarray, rng: random.Random, out: Tensor) -> None:
        height, width, _ = image.shape
        left, top, width, height = crop_box(width, height, self.data.CROP_SCALE, self.data.CROP_RATIO, rng)
        # Crop before resizing, so that pixels outside the crop do not bleed into its edge.
        self.resize(image[top : top + height, left : left + width], self.interpolation(rng), out)

    def interpolation(self, rng: random.Random) -> str:
        name = self.data.train_interpolation  # DATA.TRAIN_INTERPOLATION
        if name != "random":
            return name
        return "bilinear" if rng.random() < 0.5 else "bicubic"


class EvalTransform:
    """A resize to IMAGE_SIZE / DATA.CROP_PCT (DATA.INTERPOLATION), and a centre crop (DATA.CROP_MODE).

    Its pixels equal torchvision's and timm's.
    """

    def __init__(self, data: Data, pixels: Pixels | None = None):
        """`pixels`: of the images; None: those of the settings."""
        self.shape, self.mode = data.shape, data.CROP_MODE
        self.resized = Shape(*(math.floor(side / data.CROP_PCT) for side in self.shape))
        self.interpolation, self.max_pixels = data.INTERPOLATION, data.MAX_PIXELS
        # The padding around a resized image that is smaller than the crop is black, or the mean in timm's border mode.
        mean = data.IMAGENET_MEAN if self.mode == "border" else (0.0,)
        pixels = pixels or pixels_of(data)
        self.padding, self.resize = torch.tensor(pixels.levels(mean)), pixels.resize()

    def __call__(self, image: np.ndarray, out: Tensor) -> None:
        """Transform an image [H, W, C], and write it to `out`, [C, *Data.shape]: of Pixels.dtype_in_batch."""
        height, width = self._size(*image.shape[:2])
        if (height, width) == self.shape:
            self.resize(image, self.interpolation, out)
            return
        if height * width > self.max_pixels:  # an image one pixel high could become arbitrarily wide
            raise ImageReadError(
                f"resized to {width} x {height}, it has more pixels than DATA.MAX_PIXELS, which is {self.max_pixels}"
            )
        resized = torch.empty((height, width, image.shape[2]), dtype=out.dtype).permute(2, 0, 1)
        self.resize(image, self.interpolation, resized)
        top, left = start_of(height, self.shape.height), start_of(width, self.shape.width)
        if height < self.shape.height or width < self.shape.width:
            out.copy_(self.padding[:, None, None].expand_as(out))
        inside = out[:, max(-top, 0) : height - top, max(-left, 0) : width - left]
        top, left = max(top, 0), max(left, 0)
        inside.copy_(resized[:, top : top + inside.shape[1], left : left + inside.shape[2]])

    def seen(self, height: int, width: int) -> tuple[float, ...]:
        """Return the part of an image that the model sees: left, top, right, bottom as shares of its sides."""
        sides, crop = self._size(height, width)[::-1], self.shape[::-1]
        starts = [max(start_of(side, length), 0) for side, length in zip(sides, crop, strict=True)]
        ends = [min(start + length, side) for start, length, side in zip(starts, crop, sides, strict=True)]
        return *(start / side for start, side in zip(starts, sides, strict=True)), *(
            end / side for end, side in zip(ends, sides, strict=True)
        )

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the resized image."""
        if self.mode == "squash":
            return self.resized
        if self.mode == "border":
            ratio = max(height / self.resized.height, width / self.resized.width)
            return max(1, round(height / ratio)), max(1, round(width / ratio))
        if self.resized.height != self.resized.width:
            from datasets.transforms.covering import covering_size

            return covering_size(height, width, self.resized)
        short = min(height, width)
        return self.resized.height * height // short, self.resized.width * width // short


def start_of(length: int, crop: int) -> int:
    """Return the start of a centre crop along a side of this length. It is negative if the crop is larger."""
    spare = length - crop
    return round(spare / 2) if spare > 0 else -(-spare // 2)


def crop_box(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], rng: random.Random
) -> tuple[int, int, int, int]:
    """Return (left, top, width, height) of a crop with a random fraction of the area and a random aspect ratio.

    Only `rng.random` and `rng.uniform` are used, because their numbers are equal in every version of Python.
    """
    min_log, max_log = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(NUM_TRIES):
        area = width * height * rng.uniform(*scale)
        shape = math.exp(rng.uniform(min_log, max_log))
        crop_width, crop_height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.random() * (width - crop_width + 1))
            top = int(rng.random() * (height - crop_height + 1))
            return left, top, crop_width, crop_height
    # If no drawn crop fits, return the largest centre crop with an allowed aspect ratio.
    crop_width = min(width, max(1, round(height * ratio[1])))
    crop_height = min(height, max(1, round(width / ratio[0])))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


class Normalize(nn.Module):
    """Normalization of [B, C, H, W] on the device of the images: (image / white - mean) / std.

    White is 255 for 8 bits, mean is DATA.IMAGENET_MEAN, std is DATA.IMAGENET_STD.

    The result has the type `dtype`, which the call can override.
    """

    def __init__(self, data: Data, dtype: torch.dtype = torch.float32):
        super().__init__()
        mean = torch.tensor(data.IMAGENET_MEAN[: data.IMAGE_CHANNELS], dtype=torch.float64)
        std = torch.tensor(data.IMAGENET_STD[: data.IMAGE_CHANNELS], dtype=torch.float64)
        self.dtype, self.kind = dtype, pixels_of(data)
        # Normalization is one multiplication and one addition, without rounding to a half type between them.
        compute_dtype = torch.promote_types(dtype, torch.float32)
        self.register_buffer(
            "scale", (1 / (255 * std)).to(compute_dtype)[:, None, None] * (255 / self.kind.white), persistent=False
        )
        self.register_buffer("shift", (-mean / std).to(compute_dtype)[:, None, None], persistent=False)

    def forward(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # One pass over the images converts, computes and rounds. The result is contiguous: with channels last, the
        # gradients of the first convolution would not have the layout of its weights.
        normalized = torch.empty(images.shape, dtype=dtype or self.dtype, device=images.device)
        return torch.addcmul(self.shift, images, self.scale, out=normalized)

    def pixels(self, images: Tensor) -> Tensor:
        """Return normalized images as uint8 for pictures."""
        return self.kind.to_bytes((images - self.shift) / self.scale)
