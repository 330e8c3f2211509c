"""Batches of images with the values of their files: float32, where DATA.RANGE goes from 0 to 1."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from configs.schema import Config, Data
from datasets.native_pixels.rules import limits_of
from datasets.squares import Squares
from datasets.transforms.crop import Normalize
from datasets.transforms.pixel_rules import PixelRules
from utils.torch_internals import RESIZE_KERNELS


class NativeResize:
    """Scales the values of an image so that DATA.RANGE goes from 0 to 1, and then resizes it with antialiasing."""

    def __init__(self, data: Data):
        low, high = limits_of(data)
        self.low, self.span = torch.from_numpy(low), torch.from_numpy(high - low)

    def __call__(self, image: np.ndarray, interpolation: str, out: Tensor) -> None:
        """Resize [H, W, C] of any type into `out`, float32 [C, H', W']."""
        values = torch.from_numpy(image.astype(np.float32))
        resize_floats(values.sub_(self.low).div_(self.span).clamp_(0, 1), interpolation, out)


def resize_floats(values: Tensor, interpolation: str, out: Tensor) -> None:
    """Resize float32 [H, W, C] with antialiasing into `out`, float32 [C, H', W']."""
    if interpolation in RESIZE_KERNELS:
        resized = RESIZE_KERNELS[interpolation](
            values.permute(2, 0, 1)[None], out.shape[1:], False, None, None, out=torch.empty(0)
        )
        out.copy_(resized[0])
        return
    kernel, size = Image.Resampling[interpolation.upper()], (out.shape[2], out.shape[1])
    for layer, channel in zip(out, values.unbind(2), strict=True):
        resized = Image.fromarray(channel.contiguous().numpy()).resize(size, kernel)
        layer.copy_(torch.from_numpy(np.array(resized)))


def shrunk(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """Return an image [H, W, C] of any type resized to a height and width, with the same type."""
    out = torch.empty((pixels.shape[2], *size))
    resize_floats(torch.from_numpy(pixels.astype(np.float32)), interpolation, out)
    resized = out.permute(1, 2, 0).numpy()
    if pixels.dtype == np.float32:
        return np.ascontiguousarray(resized)
    return np.rint(resized).clip(0, np.iinfo(pixels.dtype).max).astype(pixels.dtype)


class Jitter:
    """Random brightness and contrast of images from 0 to 1, in random order: TRAIN.COLOR_JITTER without colours."""

    def __init__(self, strength: float):
        self.factors = max(0.0, 1 - strength), 1 + strength  # smallest and largest

    def __call__(self, image: Tensor, rng: random.Random) -> None:
        """Change an image, float32 [C, H, W], in place."""
        brightness, contrast = (rng.uniform(*self.factors) for _ in range(2))
        is_brightness_first = rng.random() < 0.5
        if is_brightness_first:
            image.mul_(brightness).clamp_(0, 1)
        mean = image.mean()
        image.sub_(mean).mul_(contrast).add_(mean).clamp_(0, 1)
        if not is_brightness_first:
            image.mul_(brightness).clamp_(0, 1)


class NativeNormalize(Normalize):
    """Normalization of float32 [B, C, H, W] to (image - mean) / std."""

    def __init__(self, data: Data, dtype: torch.dtype = torch.float32):
        super().__init__(data, dtype)
        self.channels = shown_channels(data)
        self.scale *= 255

    def pixels(self, images: Tensor) -> Tensor:
        """Return the channels of normalized images that pictures show, as uint8 [B, 1 or 3, H, W]."""
        return as_bytes((images - self.shift) / self.scale)[:, self.channels]


class NativeSquares(Squares):
    """Batches of square images, float32 [B, C, side, side]."""

    def __init__(self, data: Data):
        self.channels = shown_channels(data)

    def normalize(self, data: Data, dtype: torch.dtype) -> Normalize:
        return NativeNormalize(data, dtype)

    def image_bytes(self, config: Config) -> int:
        return super().image_bytes(config) * torch.float32.itemsize

    def pictures(self, pixels: Tensor) -> Sequence[np.ndarray]:
        return super().pictures(as_bytes(pixels)[:, self.channels])


class RawSquares(NativeSquares):
    """Batches of images with the values of their files, which a graph scales itself."""

    def __init__(self, data: Data):
        super().__init__(data)
        self.rules = PixelRules.of(data)

    def pictures(self, pixels: Tensor) -> Sequence[np.ndarray]:
        return [self.rules.shown(each.permute(1, 2, 0).cpu().numpy()) for each in pixels]


def shown_channels(data: Data) -> list[int]:
    return list(data.RGB or ((0, 1, 2) if data.IMAGE_CHANNELS > 2 else (0,)))


def as_bytes(images: Tensor) -> Tensor:
    return (255 * images).round().clamp(0, 255).to(torch.uint8)
