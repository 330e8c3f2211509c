"""The largest batch within a limit of memory that nothing enforces, from as few runs as possible."""

from collections.abc import Callable

from engine.memory.largest_batch import CLOSE, STEP, Largest


def climb(peak: Callable[[int], int | None], limit: float, most: int) -> Largest:
    """Where nothing says so: a line through two measured peaks tells where the limit is, a run there checks it.

    Each run is at most eight times as large as those that fit before it, so that a wrong line does not fill the machine.
    """
    points: dict[int, int] = {}
    size = STEP
    for _ in range(12):
        points[size] = peak(size) or 2 * int(limit)
        fits = max((each for each, memory in points.items() if memory <= limit), default=0)
        if not fits or (points[fits] > (1 - CLOSE) * limit and len(points) > 1):
            break
        size = 2 * STEP if len(points) == 1 else next_size(points, fits, limit)
        size = min(size, most // STEP * STEP)
        if size in points:
            break
    return Largest(fits, points.get(fits, 0), len(points))


def next_size(points: dict[int, int], fits: int, limit: float) -> int:
    """Where the line through the two largest of the points meets the limit, between what fits and what does not."""
    (low, low_memory), (high, high_memory) = sorted(points.items())[-2:]
    slope = (high_memory - low_memory) / (high - low)
    size = int(low + (limit - low_memory) / slope) if slope > 0 else 8 * fits
    too_large = min((each for each, memory in points.items() if memory > limit), default=8 * fits + STEP)
    return max(fits, min(size // STEP * STEP, too_large - STEP))
