"""Finds the largest batch that fits a device, in few runs."""

from collections.abc import Callable
from dataclasses import dataclass

STEP = 8  # batches are multiples of it, for Tensor Cores
CLOSE = 0.02  # relative difference that is not worth another run


@dataclass(frozen=True)
class Largest:
    """The result of a run at exactly this batch size; 0 if not even the smallest fits."""

    batch_size: int
    memory: int  # peak bytes
    runs: int


def bisect(peak: Callable[[int], int | None], start: int, max_size: int) -> Largest:
    """Double the batch, then bisect. `peak` runs a batch and returns its bytes, or None when out of memory."""
    fits, memory, runs = 0, 0, 0
    too_large = max_size // STEP * STEP + STEP
    size = max(STEP, min(start, max_size) // STEP * STEP)
    while too_large - fits > max(STEP, CLOSE * fits):
        runs += 1
        found = peak(size)
        if found is None:
            too_large = size
        else:
            fits, memory = size, found
        doubled, middle = 2 * fits, (fits + too_large) // 2 // STEP * STEP
        size = max(STEP, doubled if doubled < too_large else middle)
    return Largest(fits, memory, runs)
