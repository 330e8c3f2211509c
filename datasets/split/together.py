"""The images that stay in the same part: those with the same name, in the same group, and copies of each other."""

import numpy as np

from datasets.split.by_hash import hashes_of
from datasets.types import ImageSet


def group_numbers(image_set: ImageSet) -> np.ndarray:
    """Return int64 [N]: the number of each image's group, from 0. Groups that share a photo or a copy are one."""
    columns = [hashes_of(image_set.split_keys(), seed=0)] if image_set.has_groups else []
    if image_set.copies is not None:
        columns.append(image_set.copies)
    return joined(*columns)


def joined(*columns: np.ndarray) -> np.ndarray:
    """Return int64 [N]: a number for each image, equal if two images are equal in a column, or linked by others that are."""
    found = np.arange(len(columns[0]))
    members = [np.unique(column, return_inverse=True)[1] for column in columns]
    before = None
    while before is None or (found != before).any():
        before = found
        for column in members:
            least = np.full(column.max(initial=-1) + 1, len(found))
            np.minimum.at(least, column, found)
            found = least[column]
    return np.unique(found, return_inverse=True)[1]
