"""The values of images, for a row of -check."""

from collections.abc import Callable

import numpy as np


class Survey:
    """The values of a sample of images, for a row of -check. 8 bits need no such row."""

    def add(self, number: int, pixels: np.ndarray) -> None:
        """Note the values of an image."""

    def describe(self, name: Callable[[int], str]) -> list[str]:
        """Return a line about the images, and lines about what is doubtful. `name(number)` names an image."""
        return []
