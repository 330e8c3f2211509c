"""Random erasing of whole patches, as in timm's PatchRandomErasing: boxes of the grid, drawn on the host."""

import math
import random

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.batch_order import Piece, sample_rng
from datasets.transforms.erasing import ERASED_AREA, ERASED_RATIO

NUM_TRIES = 10  # attempts to draw a box that fits into the grid, as in timm
NUM_NOISE = 1024  # patches of noise, from which erased patches are filled
NO_BOX = (0,) * 6


class PatchBoxes:
    """Draws the boxes to erase. A box is top, left, height and width in patches, the start of its noise, and 0."""

    def __init__(self, config: Config):
        self.settings, self.seed = config.TRAIN, config.SEED

    def table(self, piece: Piece, grids: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Return int64 [B, 1 + RANDOM_ERASE_COUNT, 6] for Batch.boxes.

        The first row of each image holds the fraction of the mixed image that comes from the image itself (the bits of
        a float64), and its grid. The other rows hold boxes.
        """
        count = self.settings.RANDOM_ERASE_COUNT if self.settings.RANDOM_ERASE_PROB else 0
        table = np.zeros((len(grids), 1 + count, 6), np.int64)
        table[:, 0, 0], table[:, 0, 1:3] = shares.view(np.int64), grids
        for position, grid in enumerate(grids.tolist() if count else ()):
            index, repeat = int(piece.indices[position]), int(piece.repeats[position])
            rng = sample_rng(self.seed, piece.epoch, index, "erasing", repeat)
            if rng.random() < self.settings.RANDOM_ERASE_PROB:
                boxes = self._boxes(rng, *grid)
                table[position, 1 : 1 + len(boxes)] = boxes
        return table

    def _boxes(self, rng: random.Random, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Draw the boxes of one image. RANDOM_ERASE_COUNT boxes share the erased area."""
        count = 1 + int(rng.random() * self.settings.RANDOM_ERASE_COUNT)
        return [self._box(rng, rows, columns, count) for _ in range(count)]

    def _box(self, rng: random.Random, rows: int, columns: int, count: int) -> tuple[int, ...]:
        for _ in range(NUM_TRIES):
            area = rng.uniform(*ERASED_AREA) / count * rows * columns
            ratio = math.exp(rng.uniform(*map(math.log, ERASED_RATIO)))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < height <= rows and 0 < width <= columns:
                top, left = int(rng.random() * (rows - height + 1)), int(rng.random() * (columns - width + 1))
                return top, left, height, width, int(rng.random() * NUM_NOISE), 0
        return NO_BOX


def shares_of(table: np.ndarray) -> np.ndarray:
    """Return the fraction of each mixed image that comes from the image itself, float32 [B], from a table of boxes."""
    return np.ascontiguousarray(table[:, 0, 0]).view(np.float64).astype(np.float32)


class PatchErasing:
    """Fills the erased patches of a batch on its device, with a single operation."""

    def __init__(self, config: Config, device: torch.device, size: int):
        """Make the noise. `size`: the number of values in a patch."""
        self.mode, channels = config.TRAIN.RANDOM_ERASE_MODE, config.DATA.IMAGE_CHANNELS
        generator = torch.Generator().manual_seed(config.SEED)
        noise = torch.zeros(1, size)
        if self.mode == "rand":  # one random colour
            noise = torch.randn(NUM_NOISE, channels, generator=generator).repeat(1, size // channels)
        elif self.mode == "pixel":
            noise = torch.randn(NUM_NOISE, size, generator=generator)
        self.noise = noise.to(device)

    def rows(self, table: np.ndarray, length: int) -> np.ndarray:
        """Return the index of each erased patch in the batch and the index of its noise, int64 [2, M]."""
        filled = np.full((len(table), length), -1)  # the noise of each patch; later boxes cover earlier ones
        for position, (head, *boxes) in enumerate(table.tolist()):
            rows, columns = head[1:3]
            grid = filled[position, : rows * columns].reshape(rows, columns)
            for top, left, height, width, start, _ in boxes:
                numbers = start + np.arange(height * width).reshape(height, width) * (self.mode == "pixel")
                grid[top : top + height, left : left + width] = numbers % len(self.noise)
        erased = np.flatnonzero(filled >= 0)
        return np.stack((erased, filled.ravel()[erased]))

    def __call__(self, patches: Tensor, rows: Tensor) -> None:
        """Erase patches [B, N, P * P * C] in place. `rows`: the result of `rows` on the device of the patches."""
        patches.view(-1, patches.shape[-1])[rows[0]] = self.noise.to(patches.dtype)[rows[1]]
