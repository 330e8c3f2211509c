"""Epochs that repeat images of rare classes (DATA.SAMPLER balanced)."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from datasets.shuffle import EpochOrder, FullShuffle, draws

CLASS_BITS = 24  # of a key of 64 by which images are sorted; below the class are bits of a random number


class BalancedOrder(EpochOrder):
    """An epoch of as many places as images, shared among the classes in equal parts.

    A class of fewer images than places repeats all of them equally often, but for a random part of them in the last round;
    of the others a random part occurs. Besides the targets, it takes 4 bytes of memory for each image.
    """

    def __init__(self, targets: np.ndarray, counts: np.ndarray, seed: int, epoch: int):
        """`counts`: the images of each class."""
        self._targets, self._counts, self._seeds = targets, counts, (seed, epoch)
        # One random start in [0, 1) for all edges: each class gets its share on average, also one of less than a place.
        # The last seed, 3 here and 4 below, keeps these draws apart from each other and from FullShuffle's.
        start = (draws((seed, epoch, 3), 0, 1)[0] >> np.uint64(11)) / 2.0**53
        edges = np.floor(len(targets) * np.arange(1, len(counts) + 1) / len(counts) + start)
        self._places = np.concatenate([[0], edges]).astype(np.int64)
        self._shuffle = FullShuffle(len(targets), seed, epoch)

    @property
    def edges(self) -> Sequence[int]:
        return self._shuffle.edges

    def block(self, number: int) -> np.ndarray:
        places = self._shuffle.block(number).astype(np.int64)
        classes = np.searchsorted(self._places, places, "right") - 1
        within = (places - self._places[classes]) % self._counts[classes]
        return self._by_class[(np.cumsum(self._counts) - self._counts)[classes] + within]

    @cached_property
    def _by_class(self) -> np.ndarray:
        """The images class by class, those of a class in a random order."""
        keys = draws((*self._seeds, 4), 0, len(self._targets)) >> np.uint64(CLASS_BITS)
        keys |= self._targets.astype(np.uint64) << np.uint64(64 - CLASS_BITS)
        return np.argsort(keys, kind="stable").astype(np.uint32)
