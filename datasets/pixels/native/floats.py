"""Changes of images with the values of their files: scaling to 0 to 1, resizing, brightness and contrast."""

import random

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from utils.torch_internals import RESIZE_KERNELS


class NativeResize:
    """Scales an image so that `low` becomes 0 and `high` 1, and then resizes it with antialiasing."""

    def __init__(self, low: np.ndarray, high: np.ndarray):
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
