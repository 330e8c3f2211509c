"""Epochs that repeat images of rare classes (DATA.SAMPLER balanced)."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from datasets.shuffle import EpochOrder, FullShuffle, draws

CLASS_BITS = 24  # the number of upper bits of a 64-bit sort key that hold the class; the lower bits are random


class BalancedOrder(EpochOrder):
    """An epoch as long as the image set, in which every class has the same number of places, or one more.

    A class with fewer images than places repeats all of them equally often, and fills the other places with a random
    subset. A class with more images than places uses a random subset. The order takes 4 bytes of memory per image.
    """

    def __init__(self, targets: np.ndarray, counts: np.ndarray, seed: int, epoch: int):
        """`counts`: the number of images of each class."""
        self._targets, self._counts, self._seeds = targets, counts, (seed, epoch)
        # The same random number in [0, 1) is added to all edges, so that each class gets its share of places on
        # average, even a share below one place.
        # The last seed, 3 here and 4 below, makes these draws independent of each other and of FullShuffle's.
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
        """The images sorted by class, in random order within each class."""
        keys = draws((*self._seeds, 4), 0, len(self._targets)) >> np.uint64(CLASS_BITS)
        keys |= self._targets.astype(np.uint64) << np.uint64(64 - CLASS_BITS)
        return np.argsort(keys, kind="stable").astype(np.uint32)
