"""Batches as the loaders make them, with settings that erase and mix images."""

import numpy as np
import torch

from configs.schema import Config
from datasets import Batch, Piece
from tests.support.configs import replaced

SIDE = 12
MIXES = {"MIXUP_ALPHA": 0.8, "CUTMIX_ALPHA": 1.0, "MIXUP_MODE": "elem"}
ERASES = {"RANDOM_ERASE_PROB": 0.7, "RANDOM_ERASE_COUNT": 3}


def settings(channels: int = 3, **train) -> Config:
    return replaced(Config(), DATA={"IMAGE_SIZE": SIDE, "IMAGE_CHANNELS": channels}, TRAIN=train)


def batch(count: int, channels: int = 3) -> Batch:
    """Return a batch of images in the memory layout of decoded pixels."""
    pixels = torch.from_numpy(
        np.random.default_rng(0).integers(256, size=(count, SIDE, SIDE, channels), dtype=np.uint8)
    )
    of_it = Piece(2, np.arange(40, 40 + count), count, 5, 6, np.arange(count) % 2)
    return Batch(pixels.permute(0, 3, 1, 2), torch.arange(count), count, [], of_it)
