"""Random orders that depend on their seeds alone, in every version of numpy; long ones are computed in blocks.

numpy guarantees the same output in every version for its bit generators, but not for `Generator.permutation`: so raw draws
are sorted.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

FRACTION_BITS = 31  # of a random number in [0, 1); a position in the order takes the other 32
LARGEST_BLOCK = 1 << 20  # of a full shuffle: a quarter of a second, most of it for all draws again
NEARBY_BLOCK = 1 << 16
DRAWN_AT_ONCE = 1 << 18


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """The numbers 0 .. count - 1 in an order that depends on the seeds alone."""
    return np.argsort(draws(seeds, 0, count), kind="stable")


class EpochOrder:
    """An order of the numbers 0 .. count - 1 that is computed in blocks, so that it never lies in memory as a whole.

    `edges` are the positions where the blocks begin, and the end of the last one.
    """

    edges: Sequence[int]

    def block(self, number: int) -> np.ndarray:
        """The numbers at positions edges[number] .. edges[number + 1] - 1."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, positions: slice) -> np.ndarray:
        return self.part(positions, self.block)

    def part(self, positions: slice, block: Callable[[int], np.ndarray]) -> np.ndarray:
        """int64: the numbers at these positions, out of the blocks that `block` returns."""
        start, stop, _ = positions.indices(len(self))
        numbers = range(np.searchsorted(self.edges, start, "right") - 1, np.searchsorted(self.edges, stop))
        parts = [block(each)[max(start - self.edges[each], 0) : stop - self.edges[each]] for each in numbers]
        return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64)


class FullShuffle(EpochOrder):
    """The order of `shuffled`. A block is the numbers whose draws share their upper bits."""

    def __init__(self, count: int, *seeds: int, largest_block: int = LARGEST_BLOCK):
        self.count, self._seeds = count, seeds
        self._bits = np.uint64((count // largest_block).bit_length())
        self._type = np.uint32 if count < 1 << 32 else np.int64

    @cached_property
    def edges(self) -> Sequence[int]:
        if not self._bits:
            return [0, self.count]
        sizes = sum(np.bincount(upper, minlength=1 << int(self._bits)) for _, _, upper in self._chunks())
        return np.concatenate([[0], np.cumsum(sizes)])

    def block(self, number: int) -> np.ndarray:
        if not self._bits:
            return shuffled(self.count, *self._seeds).astype(self._type)
        numbers, drawn = [], []
        for first, chunk, upper in self._chunks():
            found = np.flatnonzero(upper == number)
            numbers.append((first + found).astype(self._type))
            drawn.append(chunk[found])
        return np.concatenate(numbers)[np.argsort(np.concatenate(drawn), kind="stable")]

    def _chunks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """All draws again, in parts: the number of the first one, the draws, and the block of each."""
        for first in range(0, self.count, DRAWN_AT_ONCE):
            chunk = draws(self._seeds, first, min(DRAWN_AT_ONCE, self.count - first))
            yield first, chunk, (chunk >> (np.uint64(64) - self._bits)).astype(np.int64)


class NearbyShuffle(EpochOrder):
    """A shuffle that moves each number by less than `reach` positions, which is less than `count`.

    Number i is sorted by i + reach x a random number in [0, 1): so it comes after all numbers up to i - reach, and before
    all from i + reach on.
    """

    def __init__(self, count: int, reach: int, *seeds: int, block_size: int = NEARBY_BLOCK):
        self.count, self.reach, self._seeds = count, reach, seeds
        self.edges = [*range(0, count, max(block_size, reach)), count]

    def block(self, number: int) -> np.ndarray:
        start, stop = self.edges[number], self.edges[number + 1]
        # At these positions there is no number below `first`, and none above `last`.
        first, last = max(start - self.reach + 1, 0), min(stop + self.reach - 2, self.count - 1)
        drawn = draws(self._seeds, first, last + 1 - first)
        fractions = (drawn >> np.uint64(64 - FRACTION_BITS)).astype(np.int64)
        keys = (np.arange(first, last + 1, dtype=np.int64) << FRACTION_BITS) + self.reach * fractions
        return first + np.argsort(keys, kind="stable")[start - first : stop - first]


def nearby_shuffle(count: int, reach: int, *seeds: int) -> EpochOrder:
    """A shuffle that moves each number by less than `reach` positions; a reach of `count` or more allows any order."""
    return FullShuffle(count, *seeds) if reach >= count else NearbyShuffle(count, reach, *seeds)


class GroupedShuffle(EpochOrder):
    """Shuffled groups, such as the tars of a set, and then samples moved by less than `reach` positions."""

    def __init__(self, starts: np.ndarray, reach: int, seed: int, epoch: int):
        """`starts` [groups + 1]: the first sample of each group, whose samples follow one another, and their number."""
        # The last number keeps the two draws apart: numpy ignores trailing zeros of a seed.
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
        """The groups to which the samples at positions start .. stop - 1 can belong, in the order of the epoch."""
        first, last = max(start - self.reach + 1, 0), min(stop + self.reach - 2, len(self) - 1)
        between = slice(int(self._group_at(first)), int(self._group_at(last)) + 1)
        return self.groups[between][np.diff(self._turns)[between] > 0]

    def _group_at(self, turns: np.ndarray | int) -> np.ndarray:
        return np.searchsorted(self._turns, turns, "right") - 1


def draws(seeds: tuple[int, ...], first: int, count: int) -> np.ndarray:
    """uint64 [count]: draws first .. first + count - 1 of these seeds. numpy ignores trailing zeros of them."""
    return np.random.PCG64(np.random.SeedSequence(seeds)).advance(first).random_raw(count)
