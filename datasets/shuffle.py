"""Random orders that depend only on their seeds, not on the version of numpy.

numpy guarantees the same output in every version for its bit generators, but not for `Generator.permutation`. So these
orders sort raw draws.
"""

from collections.abc import Callable, Sequence

import numpy as np


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """Return the numbers 0 .. count - 1 in an order that depends only on the seeds."""
    return np.argsort(draws(seeds, 0, count), kind="stable")


class EpochOrder:
    """An order of the numbers 0 .. count - 1 that is computed block by block.

    `edges` are the positions where the blocks begin, and the end of the last block.
    """

    edges: Sequence[int]

    def block(self, number: int) -> np.ndarray:
        """Return the numbers at positions edges[number] .. edges[number + 1] - 1."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, positions: slice) -> np.ndarray:
        return self.part(positions, self.block)

    def part(self, positions: slice, block: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return the numbers at these positions as int64. `block(number)` returns a block."""
        start, stop, _ = positions.indices(len(self))
        numbers = range(np.searchsorted(self.edges, start, "right") - 1, np.searchsorted(self.edges, stop))
        parts = [block(each)[max(start - self.edges[each], 0) : stop - self.edges[each]] for each in numbers]
        return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64)


class FullShuffle(EpochOrder):
    """The order that `shuffled` returns, as one block."""

    def __init__(self, count: int, *seeds: int):
        self.edges, self._seeds = [0, count], seeds

    def block(self, number: int) -> np.ndarray:
        return shuffled(len(self), *self._seeds).astype(np.uint32)


def draws(seeds: tuple[int, ...], first: int, count: int) -> np.ndarray:
    """Return `count` draws (uint64) for these seeds, starting with draw `first`. Trailing zero seeds have no effect."""
    return np.random.PCG64(np.random.SeedSequence(seeds)).advance(first).random_raw(count)
