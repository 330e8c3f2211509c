"""Random orders that depend on their seeds alone, in every version of numpy."""

import numpy as np

FRACTION_BITS = 31  # of a random number in [0, 1); a position in the order takes the other 32


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """The numbers 0 .. count - 1 in an order that depends on the seeds alone.

    numpy guarantees the same output in every version for its bit generators, but not for `Generator.permutation`: so
    raw draws are sorted.
    """
    return np.argsort(_draws(count, seeds), kind="stable")


def shuffled_nearby(count: int, reach: int, *seeds: int) -> np.ndarray:
    """A shuffle that moves each number by less than `reach` positions; a reach of `count` or more allows any order.

    Number i is sorted by i + reach x a random number in [0, 1): a number with key k comes after all numbers up to
    k - reach and before all above k.
    """
    if reach >= count:
        return shuffled(count, *seeds)
    fractions = (_draws(count, seeds) >> np.uint64(64 - FRACTION_BITS)).astype(np.int64)
    return np.argsort((np.arange(count, dtype=np.int64) << FRACTION_BITS) + reach * fractions, kind="stable")


def _draws(count: int, seeds: tuple[int, ...]) -> np.ndarray:
    return np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
