"""What loader workers draw for the images of a training batch and the device carries out, as plain numbers."""

from typing import NamedTuple

import numpy as np

# The columns of Draws.rows. The rows of a chain of operations, a place in it and a kind are one step for all their images.
IMAGE, CHAIN, LAYER, KIND, FIRST_PARAMETER = range(5)
NUM_PARAMETERS = 9


class ImageDraws(NamedTuple):
    """Of one image."""

    boxes: list[tuple[int, ...]] = []  # that are erased: RANDOM_ERASE_COUNT rows of Boxes in erasing.py, or none
    rows: list[tuple[float, ...]] = []  # operations on the device, of OperationRows in on_device/rows.py
    weights: tuple[float, ...] = ()  # of AugMix's chains, and of their sum; NaN: they are blended one by one


class Draws(NamedTuple):
    """Of a batch; on the host, which knows from them what to start on the device."""

    boxes: np.ndarray  # int64 [B, RANDOM_ERASE_COUNT or 0, 6]
    rows: np.ndarray  # float64 [N, 4 columns and the parameters]
    weights: np.ndarray  # float64 [B, chains + 1 or 0]

    @classmethod
    def of(cls, images: list[ImageDraws]) -> "Draws":
        """Those of all images of a batch."""
        rows = [row for each in images for row in each.rows]
        return cls(
            np.array([each.boxes for each in images], np.int64),
            np.array(rows, np.float64).reshape(-1, FIRST_PARAMETER + NUM_PARAMETERS),
            np.array([each.weights for each in images], np.float64),
        )

    @property
    def has_operations(self) -> bool:
        return len(self.rows) > 0 or self.weights.size > 0

    def part(self, start: int, end: int) -> "Draws":
        """Those of the images at these positions."""
        rows = self.rows[(start <= self.rows[:, IMAGE]) & (self.rows[:, IMAGE] < end)].copy()
        rows[:, IMAGE] -= start
        return Draws(self.boxes[start:end], rows, self.weights[start:end])
