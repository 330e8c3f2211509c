"""From an image of any size to the square that the model sees: uint8 on the CPU, normalised on the device."""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from configs.schema import Data
from datasets.types import ImageReadError
from utils.errors import ConfigError

KERNELS = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}
RESAMPLE = {"nearest": Image.Resampling.NEAREST, "lanczos": Image.Resampling.LANCZOS}
NUM_TRIES = 10  # as torchvision: a crop that does not fit the image is drawn again this often


class TrainTransform:
    """A random crop, resized, perhaps mirrored, and augmented. What is random comes from the generator it is given."""

    def __init__(self, data: Data, augment: Callable[[Tensor, random.Random], Tensor] | None = None):
        self.augment = augment
        self.scale = _least_and_most("DATA.CROP_SCALE", data.CROP_SCALE)
        self.ratio = _least_and_most("DATA.CROP_RATIO", data.CROP_RATIO)
        self.hflip, self.interpolation = data.HFLIP, data.INTERPOLATION

    def __call__(self, image: np.ndarray, rng: random.Random, out: Tensor) -> None:
        """From uint8 [H, W, C] to uint8 [C, side, side]."""
        left, top, width, height = crop_box(image.shape[1], image.shape[0], self.scale, self.ratio, rng)
        # Crop, then resize: pixels from outside the crop must not bleed into its edge.
        resize(image[top : top + height, left : left + width], self.interpolation, out)
        if rng.random() < self.hflip:
            out.copy_(out.flip(2))
        if self.augment:
            out.copy_(self.augment(out, rng))


class EvalTransform:
    """The short side to IMAGE_SIZE / CROP_PCT, then the centre: the pixels of torchvision's Resize and CenterCrop."""

    def __init__(self, data: Data):
        self.side = data.IMAGE_SIZE
        self.short_side = math.floor(data.IMAGE_SIZE / data.CROP_PCT)
        self.interpolation = data.INTERPOLATION

    def __call__(self, image: np.ndarray, out: Tensor) -> None:
        """From uint8 [H, W, C] to uint8 [C, side, side]."""
        height, width, channels = image.shape
        short = min(height, width)
        height, width = (self.short_side * each // short for each in (height, width))
        left, top = round((width - self.side) / 2), round((height - self.side) / 2)
        if (height, width) == (self.side, self.side):
            resize(image, self.interpolation, out)
            return
        if height * width > Image.MAX_IMAGE_PIXELS:  # a line of one pixel becomes a picture of any size
            raise ImageReadError(f"resized to {width} x {height} it has more than {Image.MAX_IMAGE_PIXELS} pixels")
        resized = torch.empty((height, width, channels), dtype=torch.uint8).permute(2, 0, 1)
        resize(image, self.interpolation, resized)
        out.copy_(resized[:, top : top + self.side, left : left + self.side])


def resize(image: np.ndarray, interpolation: str, out: Tensor) -> None:
    """uint8 [H, W, C] to the size of `out` [C, H', W'], with antialiasing.

    torch's kernels give Pillow's pixels to within rounding, five times as fast, straight into their place.
    """
    if interpolation in KERNELS:
        source = torch.from_numpy(image).permute(2, 0, 1)[None]
        KERNELS[interpolation](source, out.shape[1:], False, None, None, out=out[None])
    else:
        pixels = Image.fromarray(image if image.shape[2] > 1 else image[:, :, 0])
        pixels = np.array(pixels.resize((out.shape[2], out.shape[1]), RESAMPLE[interpolation]))
        out.copy_(torch.from_numpy(pixels.reshape(*out.shape[1:], -1)).permute(2, 0, 1))


def crop_box(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], rng: random.Random
) -> tuple[int, int, int, int]:
    """left, top, width, height of a crop with a random share of the area and a random width over height.

    Only `rng.random` is used: of Python's generators it alone is the same in every version.
    """
    least_log, most_log = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(NUM_TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * rng.random())
        shape = math.exp(least_log + (most_log - least_log) * rng.random())
        crop_width, crop_height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.random() * (width - crop_width + 1))
            top = int(rng.random() * (height - crop_height + 1))
            return left, top, crop_width, crop_height
    # Nothing fitted: the largest crop in the centre whose shape is allowed.
    crop_width = min(width, max(1, round(height * ratio[1])))
    crop_height = min(height, max(1, round(width / ratio[0])))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


class Normalize(nn.Module):
    """uint8 [B, C, H, W] to (image / 255 - mean) / std, on whatever device it is, as `dtype`."""

    def __init__(self, data: Data, dtype: torch.dtype = torch.float32):
        super().__init__()
        mean = torch.tensor(per_channel("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN, data), dtype=torch.float64)
        std = torch.tensor(per_channel("DATA.IMAGENET_STD", data.IMAGENET_STD, data), dtype=torch.float64)
        self.dtype = dtype
        # One multiplication and one addition, which a half type must not round on the way.
        compute_dtype = torch.promote_types(dtype, torch.float32)
        self.register_buffer("scale", (1 / (255 * std)).to(compute_dtype)[:, None, None], persistent=False)
        self.register_buffer("shift", (-mean / std).to(compute_dtype)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        # Plain layout: in channels last, gradients of the first convolution would come in another layout than its weights.
        images = images.to(self.scale.dtype, memory_format=torch.contiguous_format)
        return torch.addcmul(self.shift, images, self.scale).to(self.dtype)


def per_channel(name: str, values: tuple[float, ...], data: Data) -> tuple[float, ...]:
    """One value for each channel; three equal ones, as the default, do for a grey image too."""
    values = values[:1] * data.IMAGE_CHANNELS if len(set(values)) == 1 else values
    if len(values) != data.IMAGE_CHANNELS:
        raise ConfigError(
            f"{name}: {len(values)} values {list(values)}, but DATA.IMAGE_CHANNELS is {data.IMAGE_CHANNELS}; give one "
            "for each channel"
        )
    return values


def _least_and_most(name: str, values: tuple[float, ...]) -> tuple[float, float]:
    if len(values) != 2 or values[0] > values[1]:
        raise ConfigError(f"{name}: {list(values)}; give two numbers, the least and the most")
    return values
