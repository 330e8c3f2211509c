"""Batches of random or black patches, for `-dataset synthetic`, batch-size trials and memory estimates."""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.batch_order import Piece
from datasets.types import Batch, ImageSet
from extras.native_aspect.grids import length_of, lengths_of, new_batch, set_grid
from extras.native_aspect.models import patch_size_of


def blank_batch(config: Config, count: int, length: int | None = None) -> Tensor:
    """Return a batch of black images whose patches fill the length, by default the largest training length."""
    length = length or max(lengths_of(config.DATA))
    batch = new_batch(count, length, patch_size_of(config), config.DATA.IMAGE_CHANNELS).zero_()
    rows = next(each for each in range(math.isqrt(length), 0, -1) if length % each == 0)
    set_grid(batch, rows, length // rows)
    return batch


class SyntheticSequences:
    """One batch of random images for each length, kept on the device. Every batch is a slice of one of these."""

    def __init__(self, config: Config, image_set: ImageSet, batch_size: int, rank: int, device: torch.device):
        rng, count = np.random.default_rng([config.SEED, rank]), min(batch_size, len(image_set))
        self.config, self.images = config, {}
        for length in sorted({*lengths_of(config.DATA), config.DATA.TOKENS}):
            images = blank_batch(config, count, length)
            images[:, :-1] = torch.from_numpy(rng.integers(256, size=images[:, :-1].shape, dtype=np.uint8))
            self.images[length] = images.to(device)
        self.targets = torch.from_numpy(image_set.targets[:count]).to(device)

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for piece in pieces:
            count, is_training = len(piece.indices), piece.repeats is not None
            length = length_of(self.config, piece.step) if is_training else self.config.DATA.TOKENS
            yield Batch(self.images[length][:count], self.targets[:count], piece.num_samples, [], piece)
