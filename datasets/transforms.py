"""From an image of any size to the square that the model sees: uint8 on the CPU, normalised on the device."""

import math
import random

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from configs.schema import Data
from utils.errors import ConfigError

RESAMPLE = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
NUM_TRIES = 10  # as torchvision: a crop that does not fit the image is drawn again this often


class TrainTransform:
    """A random crop, resized, and perhaps mirrored. What is random comes from the generator it is given."""

    def __init__(self, data: Data):
        self.size = data.IMAGE_SIZE
        self.scale = _least_and_most("DATA.CROP_SCALE", data.CROP_SCALE)
        self.ratio = _least_and_most("DATA.CROP_RATIO", data.CROP_RATIO)
        self.hflip = data.HFLIP
        self.resample = RESAMPLE[data.INTERPOLATION]

    def __call__(self, image: Image.Image, rng: random.Random) -> Tensor:
        left, top, width, height = crop_box(*image.size, self.scale, self.ratio, rng)
        # Crop, then resize: resize(box=...) would let pixels from outside the crop bleed into its edge.
        image = image.crop((left, top, left + width, top + height)).resize((self.size, self.size), self.resample)
        if rng.random() < self.hflip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(image)


class EvalTransform:
    """The short side to IMAGE_SIZE / CROP_PCT, then the centre: pixel for pixel torchvision's Resize and CenterCrop."""

    def __init__(self, data: Data):
        self.size = data.IMAGE_SIZE
        self.short_side = math.floor(data.IMAGE_SIZE / data.CROP_PCT)
        self.resample = RESAMPLE[data.INTERPOLATION]

    def __call__(self, image: Image.Image) -> Tensor:
        short = min(image.size)
        width, height = (self.short_side * side // short for side in image.size)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        image = image.resize((width, height), self.resample)
        return to_tensor(image.crop((left, top, left + self.size, top + self.size)))


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


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 [C, H, W], channels last in memory as Pillow has them: moving them apart is the device's work."""
    pixels = np.array(image)
    return torch.from_numpy(pixels[:, :, None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)


class Normalize(nn.Module):
    """uint8 [B, C, H, W] to (image / 255 - mean) / std, on whatever device it is, as `dtype`."""

    def __init__(self, data: Data, dtype: torch.dtype = torch.float32):
        super().__init__()
        mean = torch.tensor(_per_channel("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN, data), dtype=torch.float64)
        std = torch.tensor(_per_channel("DATA.IMAGENET_STD", data.IMAGENET_STD, data), dtype=torch.float64)
        self.dtype = dtype
        # One multiplication and one addition, which a half type must not round on the way.
        compute_dtype = torch.promote_types(dtype, torch.float32)
        self.register_buffer("scale", (1 / (255 * std)).to(compute_dtype)[:, None, None], persistent=False)
        self.register_buffer("shift", (-mean / std).to(compute_dtype)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        # Plain layout: in channels last, gradients of the first convolution would come in another layout than its weights.
        images = images.to(self.scale.dtype, memory_format=torch.contiguous_format)
        return torch.addcmul(self.shift, images, self.scale).to(self.dtype)


def _per_channel(name: str, values: tuple[float, ...], data: Data) -> tuple[float, ...]:
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
