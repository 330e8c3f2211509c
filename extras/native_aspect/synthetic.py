"""Batches of random or black patches, for `-dataset synthetic`, batch-size trials and memory estimates."""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.order import Piece
from datasets.types import Batch, ImageSet
from extras.native_aspect.grids import length_of, lengths_of, new_batch, set_grid
from extras.native_aspect.models import patch_size_of


def blank_batch(config: Config, count: int, length: int | None = None) -> Tensor:
    """Return a batch of black images of `length` patches without padding, by default the largest training length."""
    length = length or max(lengths_of(config.DATA))
    batch = new_batch(count, length, patch_size_of(config), config.DATA.IMAGE_CHANNELS).zero_()
    rows = next(each for each in range(math.isqrt(length), 0, -1) if length % each == 0)
    set_grid(batch, rows, length // rows)
    return batch


class SyntheticSequences:
    """One batch of random images for each length, kept on the device. Every batch is a slice of one of them."""

    def __init__(self, config: Config, image_set: ImageSet, batch_size: int, rank: int, device: torch.device):
        self.config, self.rank, self.count, self.device = config, rank, min(batch_size, len(image_set)), device
        self.targets = torch.from_numpy(image_set.targets[: self.count]).to(device)
        self.images: dict[int, Tensor] = {}  # {length: batch}

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for piece in pieces:
            count, is_training = len(piece.indices), piece.repeats is not None
            length = length_of(self.config, piece.step) if is_training else self.config.DATA.TOKENS
            yield Batch(self._of_length(length)[:count], self.targets[:count], piece.num_samples, [], piece)

    def _of_length(self, length: int) -> Tensor:
        """Return the batch of this length. It is generated when it is first needed."""
        if length not in self.images:
            rng = np.random.default_rng([self.config.SEED, self.rank, length])
            images = blank_batch(self.config, self.count, length)
            images[:, :-1] = torch.from_numpy(rng.integers(256, size=images[:, :-1].shape, dtype=np.uint8))
            self.images[length] = images.to(self.device)
        return self.images[length]
