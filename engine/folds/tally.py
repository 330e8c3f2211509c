"""The tally of one fold, which adds its images to the tally of all images."""

from typing import Any

import numpy as np
from torch import Tensor

from engine.evaluation.scores import Scores
from engine.evaluation.tally import Tally
from utils.distributed import Process


class CountingTally:
    """Counts images, in place of scores. It is its own record of the images of this process."""

    def __init__(self, of_all: Tally | None = None):
        """`of_all`: a tally that gets the images too."""
        self._of_all, self._num_images, self._num_excluded = of_all, 0, 0
        self.per_image = self
        self.indices = np.zeros(0, np.int64)
        self.features: list[tuple] = []

    def add(self, outputs: Any, targets: Tensor, num_excluded: int) -> None:
        if self._of_all:
            self._of_all.add(outputs, targets, num_excluded)
        self._num_images += len(targets)
        self._num_excluded += num_excluded

    def result(self, process: Process) -> Scores:
        """Return scores with the numbers of images, which an evaluation checks. Collective."""
        counts = process.join([(self._num_images, self._num_excluded)])
        num_images, num_excluded = (sum(column) for column in zip(*counts, strict=True))
        return Scores(0.0, 0.0, 0.0, num_images, num_excluded)
