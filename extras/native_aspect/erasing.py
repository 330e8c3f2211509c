"""Random erasing of whole patches, as in timm's PatchRandomErasing: boxes of the grid, drawn on the host."""

import math
import random

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.order import Piece, sample_rng
from datasets.transforms.erasing import ERASED_AREA, ERASED_RATIO

NUM_TRIES = 10  # attempts to draw a box that fits into the grid, as in timm
NUM_NOISE = 1024  # number of noise patches, which replace erased patches
NO_BOX = (0,) * 5


class PatchBoxes:
    """Draws the boxes to erase.

    A box is (number of its first patch, height and width in patches, columns of the image's grid, number of its first
    noise patch). In mode pixel, its other patches use the following noise patches; in mode rand, they use the same.
    """

    def __init__(self, config: Config):
        self.settings, self.seed = config.TRAIN, config.SEED
        self.is_on = bool(self.settings.RANDOM_ERASE_PROB)

    def draw(self, piece: Piece, grids: np.ndarray) -> np.ndarray:
        """Return the boxes of each image, int64 [B, RANDOM_ERASE_COUNT, 5], padded with NO_BOX.

        `grids`: height and width of each image in patches.
        """
        drawn = np.zeros((len(grids), self.settings.RANDOM_ERASE_COUNT, len(NO_BOX)), np.int64)
        if not self.is_on:
            return drawn
        for position, grid in enumerate(grids.tolist()):
            index, repeat = int(piece.indices[position]), int(piece.repeats[position])
            rng = sample_rng(self.seed, piece.epoch, index, "erasing", repeat)
            if rng.random() < self.settings.RANDOM_ERASE_PROB:
                boxes = self._boxes(rng, *grid)
                drawn[position, : len(boxes)] = boxes
        return drawn

    def _boxes(self, rng: random.Random, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Draw up to RANDOM_ERASE_COUNT boxes for one image. As in timm, the erased area is not divided among them."""
        count = 1 + int(rng.random() * self.settings.RANDOM_ERASE_COUNT)
        return [self._box(rng, rows, columns) for _ in range(count)]

    def _box(self, rng: random.Random, rows: int, columns: int) -> tuple[int, ...]:
        for _ in range(NUM_TRIES):
            area = rng.uniform(*ERASED_AREA) * rows * columns
            ratio = math.exp(rng.uniform(*map(math.log, ERASED_RATIO)))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < height <= rows and 0 < width <= columns:
                top, left = int(rng.random() * (rows - height + 1)), int(rng.random() * (columns - width + 1))
                return top * columns + left, height, width, columns, int(rng.random() * NUM_NOISE)
        return NO_BOX


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

    def rows(self, boxes: np.ndarray, length: int) -> np.ndarray:
        """Return the index of each erased patch in the batch and the index of its noise, int64 [2, M].

        `boxes`: the result of PatchBoxes.draw for images of `length` patches.
        """
        filled = np.full((len(boxes), length), -1)  # the noise of each patch; later boxes cover earlier ones
        for noise, of_image in zip(filled, boxes.tolist(), strict=True):
            for first, height, width, columns, start in of_image:
                patches = first + columns * np.arange(height)[:, None] + np.arange(width)
                numbers = start + np.arange(height * width).reshape(height, width) * (self.mode == "pixel")
                noise[patches] = numbers % len(self.noise)
        erased = np.flatnonzero(filled >= 0)
        return np.stack((erased, filled.ravel()[erased]))

    def __call__(self, patches: Tensor, rows: Tensor) -> None:
        """Erase patches [B, N, P * P * C] in place. `rows`: the result of self.rows, on the device of the patches."""
        patches.view(-1, patches.shape[-1])[rows[0]] = self.noise.to(patches.dtype)[rows[1]]
