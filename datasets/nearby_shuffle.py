"""Random orders that read groups of images, such as tars, one after the other."""

from collections.abc import Sequence

import numpy as np

from datasets.shuffle import EpochOrder, FullShuffle, draws, shuffled

FRACTION_BITS = 31  # bits of a sort key that hold a random number in [0, 1); the position takes the other 32
NEARBY_BLOCK = 1 << 16  # the smallest number of positions in a block


class NearbyShuffle(EpochOrder):
    """A shuffle that moves each number by less than `reach` positions, where `reach` is less than `count`.

    Number i is sorted by i + reach x a random number in [0, 1). So it comes after all numbers up to i - reach, and
    before all numbers from i + reach on.
    """

    def __init__(self, count: int, reach: int, *seeds: int, block_size: int = NEARBY_BLOCK):
        self.count, self.reach, self._seeds = count, reach, seeds
        self.edges = [*range(0, count, max(block_size, reach)), count]

    def block(self, number: int) -> np.ndarray:
        start, stop = self.edges[number], self.edges[number + 1]
        # The block has no number below `first` and none above `last`.
        first, last = max(start - self.reach + 1, 0), min(stop + self.reach - 2, self.count - 1)
        drawn = draws(self._seeds, first, last + 1 - first)
        fractions = (drawn >> np.uint64(64 - FRACTION_BITS)).astype(np.int64)
        keys = (np.arange(first, last + 1, dtype=np.int64) << FRACTION_BITS) + self.reach * fractions
        return first + np.argsort(keys, kind="stable")[start - first : stop - first]


def nearby_shuffle(count: int, reach: int, *seeds: int) -> EpochOrder:
    """Return a shuffle that moves each number by less than `reach` positions. A reach of `count` allows any order."""
    return FullShuffle(count, *seeds) if reach >= count else NearbyShuffle(count, reach, *seeds)


class GroupedShuffle(EpochOrder):
    """Shuffles groups, such as the tars of a set, and then moves each sample by less than `reach` positions."""

    def __init__(self, starts: np.ndarray, reach: int, seed: int, epoch: int):
        """`starts` [groups + 1]: the first sample of each group of neighbours, then the number of all samples."""
        # The last seed, 1 here and 2 below, separates the two draws. It is not 0, because numpy ignores trailing zeros.
        groups = shuffled(len(starts) - 1, seed, epoch, 1)
        self.groups, self.reach = groups, reach
        self._starts = starts[groups]
        self._turns = np.concatenate([[0], np.cumsum(np.diff(starts)[groups])])
        self._shuffle = nearby_shuffle(int(starts[-1]), reach, seed, epoch, 2)

    @property
    def edges(self) -> Sequence[int]:
        return self._shuffle.edges

    def block(self, number: int) -> np.ndarray:
        turns = self._shuffle.block(number).astype(np.int64)
        groups = self._group_at(turns)
        return self._starts[groups] + turns - self._turns[groups]

    def groups_of(self, start: int, stop: int) -> np.ndarray:
        """Return the groups to which samples at positions start .. stop - 1 can belong, in the order of the epoch."""
        first, last = max(start - self.reach + 1, 0), min(stop + self.reach - 2, len(self) - 1)
        between = slice(int(self._group_at(first)), int(self._group_at(last)) + 1)
        return self.groups[between][np.diff(self._turns)[between] > 0]

    def _group_at(self, turns: np.ndarray | int) -> np.ndarray:
        return np.searchsorted(self._turns, turns, "right") - 1
