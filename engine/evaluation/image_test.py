"""The comparison of two models on the same images."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ImageTest:
    """McNemar's exact test of two runs on the images that both scored. Only images on which they disagree count."""

    num_images: int
    only_first: int  # number of images that only the first run classifies correctly
    only_second: int

    @property
    def value(self) -> float:
        """Return the second run's accuracy minus the first's, in percentage points."""
        return 100 * (self.only_second - self.only_first) / self.num_images

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95% interval of `value`: Wald's, with half an image added to each of four counts (Agresti and Min)."""
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
