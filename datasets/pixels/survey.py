"""The row of -check about pixels with the values of their files: the range of each channel, and what is constant."""

from collections.abc import Callable

import numpy as np

from utils.text import counted, first_of


class Survey:
    """The values of a sample of images, for a row of -check. 8 bits need no such row."""

    def add(self, number: int, pixels: np.ndarray) -> None:
        """Note the values of an image."""

    def describe(self, name: Callable[[int], str]) -> list[str]:
        """Return a line about the images, and lines about what is doubtful. `name(number)` names an image."""
        return []


class Ranges(Survey):
    """The smallest and largest value of each channel of each image in a sample."""

    def __init__(self, kind: str, count: int, num_channels: int):
        self.kind, self.values = kind, np.full((count, 2, num_channels), np.nan, np.float32)

    def add(self, number: int, pixels: np.ndarray) -> None:
        self.values[number] = pixels.min((0, 1)), pixels.max((0, 1))

    def describe(self, name: Callable[[int], str]) -> list[str]:
        numbers = np.flatnonzero(~np.isnan(self.values[:, 0, 0]))
        if not len(numbers):
            return []
        low, high = self.values[numbers].transpose(1, 0, 2)
        lows, highs, is_plain = low.min(0), high.max(0), low == high  # is_plain: bool [images, channels]
        spans = (f"{number}: {low:g} to {high:g}" for number, (low, high) in enumerate(zip(lows, highs, strict=True)))
        lines = [f"{self.kind}, {counted(len(lows), 'channel')}; {first_of([*spans], limit=16)}"]
        constant = np.flatnonzero(is_plain.all(0)).tolist()
        if constant and len(numbers) > 1:
            lines.append(
                f"without any detail in all images: {counted(len(constant), 'channel')} "
                f"({first_of([*map(str, constant)])})"
            )
        plain = numbers[is_plain.all(1)].tolist()
        if plain:
            lines.append(
                f"of one value only, such as all black: {counted(len(plain), 'image')} "
                f"({first_of([*map(name, plain)])})"
            )
        return lines
