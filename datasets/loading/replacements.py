"""Replaces an unreadable image of a training set by another one."""

from collections.abc import Iterator

import numpy as np

from datasets.image_set import ImageSet
from datasets.order import sample_rng
from datasets.pixels.rules import ImageReadError
from utils.errors import DataError

NUM_REPLACEMENTS = 8  # drawn from the images with the same target, and then as many from all


def read_replacement(
    images: ImageSet, seed: int, epoch: int, index: int, bad: list[int], reason: ImageReadError
) -> tuple[np.ndarray, int]:
    """Return an image that replaces `index`, and its own index. Add unreadable images to `bad`."""
    bad.append(index)
    num_bad = len(bad)
    for candidate in _candidates(images, seed, epoch, index):
        try:
            return images.read(candidate), candidate
        except ImageReadError as error:
            reason = error
            bad.append(candidate)
    raise DataError(
        f"{images.name(index)} cannot be read, "
        f"and neither can {len(bad) - num_bad} others ({reason}); check that DATA.DATA_PATH is still available"
    )


def _candidates(images: ImageSet, seed: int, epoch: int, index: int) -> Iterator[int]:
    """Yield other images, each once, at first those with the same target."""
    rng, tried = sample_rng(seed, epoch, index, "replacement"), {index}
    alike = np.flatnonzero(images.targets == images.targets[index])
    for pool in (alike, range(len(images.targets))):
        for _ in range(NUM_REPLACEMENTS):
            candidate = int(pool[int(rng.random() * len(pool))])
            if candidate not in tried:
                tried.add(candidate)
                yield candidate
