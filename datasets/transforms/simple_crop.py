"""DATA.TRAIN_CROP simple: DeiT III's random crop of an image, resized to the smallest size that covers the crop."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets.transforms.covering import covering_size

PADDING = 4  # pixels on each side


def crop_of_resized(transform: Any, image: np.ndarray, rng: random.Random, out: Tensor) -> None:
    """Resize an image to the smallest size that covers DATA.IMAGE_SIZE, and crop this size at a random position.

    `transform`: the TrainTransform (crop.py), which imports this file. The crop may reach a few pixels beyond the
    image, where pixels are reflected.
    """
    data, (height, width, channels) = transform.data, image.shape
    height, width = covering_size(height, width, data.shape)
    if height * width > data.MAX_PIXELS:  # an image one pixel high could become arbitrarily wide
        return transform.resized_crop(image, rng, out)
    resized = torch.empty((height, width, channels), dtype=out.dtype)
    transform.resize(image, transform.interpolation(rng), resized.permute(2, 0, 1))
    rows, columns = (_reflected(length, side, rng) for length, side in zip((height, width), data.shape, strict=True))
    out.copy_(resized[rows][:, columns].permute(2, 0, 1))


def _reflected(length: int, side: int, rng: random.Random) -> Tensor:
    """Return the positions of the crop along a side, reflected at its ends without repeating the end pixels."""
    start = int(rng.random() * (length - side + 2 * PADDING + 1)) - PADDING
    period = max(2 * (length - 1), 1)
    positions = torch.arange(start, start + side) % period
    return torch.minimum(positions, period - positions)
