"""DATA.TRAIN_CROP simple: DeiT III's random square of an image, resized to the length of its shorter side."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

PADDING = 4  # pixels on each side


def crop_of_resized(transform: Any, image: np.ndarray, rng: random.Random, out: Tensor) -> None:
    """Resize the shorter side to the side of the square, and cut out a square at a random position.

    `transform`: the TrainTransform (crop.py), which imports this file. The square may reach a few pixels beyond the
    image, where pixels are reflected.
    """
    data, (height, width, channels) = transform.data, image.shape
    side, short = data.IMAGE_SIZE, min(height, width)
    height, width = side * height // short, side * width // short
    if height * width > data.MAX_PIXELS:  # an image one pixel high could become arbitrarily wide
        return transform.resized_crop(image, rng, out)
    resized = torch.empty((height, width, channels), dtype=out.dtype)
    transform.resize(image, transform.interpolation(rng), resized.permute(2, 0, 1))
    rows, columns = (_reflected(length, side, rng) for length in (height, width))
    out.copy_(resized[rows][:, columns].permute(2, 0, 1))


def _reflected(length: int, side: int, rng: random.Random) -> Tensor:
    """Return the positions of the square along a side, reflected at its ends without repeating the end pixels."""
    start = int(rng.random() * (length - side + 2 * PADDING + 1)) - PADDING
    period = max(2 * (length - 1), 1)
    positions = torch.arange(start, start + side) % period
    return torch.minimum(positions, period - positions)
