"""The comparison of two models on the same images."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.evaluation.student import student


@dataclass(frozen=True)
class ImageTest:
    """McNemar's exact test of two runs on the images that both scored. Only images on which they disagree count."""

    num_images: int
    only_first: int  # number of images that only the first run is right about
    only_second: int

    def __str__(self) -> str:
        return f"{self.only_second} : {self.only_first} images, p {self.p:.2g}"

    @property
    def value(self) -> float:
        """Return the second run's accuracy minus the first's, in percentage points."""
        return 100 * (self.only_second - self.only_first) / self.num_images

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95% interval of `value`: Wald's, with half an image added to four counts (Agresti and Min)."""
        gap, total = self.only_second - self.only_first, self.num_images + 2
        half = 1.96 * math.sqrt(self.only_first + self.only_second + 1 - gap**2 / total)
        return 100 * (gap - half) / total, 100 * (gap + half) / total

    @property
    def p(self) -> float:
        """Return the probability of counts at least as unequal as these, if both runs were equally good."""
        number, ways, total = self.only_first + self.only_second, 1, 0
        for count in range(min(self.only_first, self.only_second) + 1):
            total += ways
            ways = ways * (number - count) // (count + 1)
        return min(1.0, 2 * total / 2**number)


DRAWS, AT_ONCE = 10_000, 2**22  # random signs of each difference, and those in memory at the same time


@dataclass(frozen=True)
class ErrorTest:
    """A paired test of two runs by the absolute errors of their numbers on the images that both scored."""

    differences: np.ndarray  # float64 [N]: the second run's error minus the first's

    @property
    def num_images(self) -> int:
        return len(self.differences)

    @property
    def value(self) -> float:
        """Return the second run's mean absolute error minus the first's."""
        return float(self.differences.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95% interval of `value`."""
        half = math.inf
        if self.num_images > 1:
            error = float(self.differences.std(ddof=1)) / math.sqrt(self.num_images)
            half = student(self.num_images - 1) * error
        return self.value - half, self.value + half

    @cached_property
    def p(self) -> float:
        """Return the share of random signs for which the mean is at least as far from 0, drawn by a seed."""
        rng, size = np.random.default_rng(0), np.abs(self.differences)
        limit, num_extreme, left = abs(self.differences.sum()) * (1 - 1e-9), 1, DRAWS
        while left:
            count = min(left, max(1, AT_ONCE // self.num_images))
            signs = rng.integers(0, 2, (count, self.num_images), np.int8)
            num_extreme += int((np.abs(size.sum() - 2 * (signs @ size)) >= limit).sum())
            left -= count
        return num_extreme / (DRAWS + 1)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:+.4g} on {self.num_images:,} images ({low:+.4g} to {high:+.4g}), p {self.p:.2g}"
