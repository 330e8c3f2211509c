"""Held-out images for data sets that come without a split of their own."""

import numpy as np

from datasets.shuffle import shuffled
from datasets.types import ImageSet


def hold_out(image_set: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Training and validation images: the same share of each class, by a seed, each part in the set's own order.

    A class always keeps an image for training, and gives one to validation if it has two and `fraction` is not 0.
    """
    held_out = np.zeros(len(image_set), dtype=bool)
    for target in np.unique(image_set.targets).tolist():
        members = np.flatnonzero(image_set.targets == target)
        num_held_out = min(max(round(len(members) * fraction), 1), len(members) - 1) if fraction else 0
        held_out[members[shuffled(len(members), seed, target)[: max(num_held_out, 0)]]] = True
    return image_set.take(np.flatnonzero(~held_out)), image_set.take(np.flatnonzero(held_out))
