"""Random orders that are functions of their seeds alone, in every version of numpy."""

import numpy as np

FRACTION_BITS = 31  # of a random number in 0..1; a place in the order has the other 32


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """The numbers 0 .. count - 1 in an order that is a function of the seeds alone.

    numpy promises that of its bit generators, but not of `Generator.permutation`: so the order is that of raw draws.
    """
    return np.argsort(_draws(count, seeds), kind="stable")


def shuffled_nearby(count: int, reach: int, *seeds: int) -> np.ndarray:
    """The same, but no number is `reach` or more places away from its own; with a reach of `count` any order may come.

    Number i is sorted by i + reach x a random number in 0..1. What has the key k then comes after all numbers up to
    k - reach and before all above k.
    """
    if reach >= count:
        return shuffled(count, *seeds)
    fractions = (_draws(count, seeds) >> np.uint64(64 - FRACTION_BITS)).astype(np.int64)
    return np.argsort((np.arange(count, dtype=np.int64) << FRACTION_BITS) + reach * fractions, kind="stable")


def _draws(count: int, seeds: tuple[int, ...]) -> np.ndarray:
    return np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
