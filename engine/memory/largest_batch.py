"""The largest batch that fits a device, from few runs. `peak` runs one: its bytes, or None when out of memory."""

from collections.abc import Callable
from dataclasses import dataclass

STEP = 8  # batches are multiples of it: Tensor Cores like those
CLOSE = 0.02  # share of the limit, or of the batch, that is not worth another run


@dataclass(frozen=True)
class Largest:
    """What was found, from a run at that very batch size; 0 where not even the smallest fits."""

    batch_size: int
    memory: int  # bytes at its peak
    runs: int


def bisect(peak: Callable[[int], int | None], start: int, most: int) -> Largest:
    """Where a device says itself that its memory is full: doubling, then halving what is between."""
    fits, memory, runs = 0, 0, 0
    too_large = most // STEP * STEP + STEP
    size = max(STEP, min(start, most) // STEP * STEP)
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
