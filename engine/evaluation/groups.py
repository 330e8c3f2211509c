"""Intervals of scores whose images come in groups: the values of DATA.GROUP_BY, and copies of one photo.

The images of a group are alike, so they say less than as many independent images. Everything here counts groups.
"""

import math
from dataclasses import dataclass

import numpy as np

from datasets import ImageSet
from datasets.split.together import group_numbers
from engine.evaluation.scores import wilson_interval
from engine.evaluation.student import student

# With fewer groups there is no interval. With 5 groups that differ as much as persons do, and an accuracy from 50 to 95%,
# the intervals of simulated runs had the accuracy of other groups in 91 to 100% of cases, and they are 25 to 80 points
# wide (tests/engine/test_groups.py).
FEWEST_GROUPS = 5


@dataclass(frozen=True)
class Interval:
    """The 95% interval of an accuracy in percent. NaN: there are too few groups."""

    low: float
    high: float
    num_groups: int


def groups_of(images: ImageSet) -> np.ndarray | None:
    """Return int64 [N]: the number of each image's group, from 0, or None if each image is a group of its own."""
    if not images.has_groups and images.copies is None:
        return None
    return group_numbers(images)


def standard_error(values: np.ndarray, groups: np.ndarray | None) -> float:
    """Return the standard error of the mean of the images' values. `groups`: see groups_of, for the same images.

    The sums of the deviations in each group vary independently of each other.
    """
    sums, count = values - values.mean(), len(values)
    if groups is not None:
        sums = np.bincount(groups, sums)[np.unique(groups)]
    if len(sums) < 2:
        return math.inf
    return math.sqrt(len(sums) / (len(sums) - 1) * float((sums**2).sum())) / count


def degrees_of(groups: np.ndarray) -> float:
    """Return the degrees of freedom of a standard error: the groups minus 1. A large group counts as several do."""
    sizes = np.bincount(groups)
    return max(float(sizes.sum() ** 2 / (sizes**2).sum()) - 1, 1.0)


def accuracy_interval(are_right: np.ndarray, groups: np.ndarray) -> Interval:
    """Return the interval of the percentage of right images: Wilson's, for as many images as would have the same error.

    `are_right`: bool [N]; `groups`: see groups_of. The accuracy of other groups lies in it, not only of other images of
    these groups.
    """
    num_groups, share = len(np.unique(groups)), float(are_right.mean())
    if num_groups < FEWEST_GROUPS:
        return Interval(math.nan, math.nan, num_groups)
    error, degrees = standard_error(are_right.astype(np.float64), groups), degrees_of(groups)
    effective = min(share * (1 - share) / error**2, len(groups)) if error else float(len(groups))
    if share in (0, 1):  # the images do not say how alike those of a group are
        effective = degrees + 1
    return Interval(*wilson_interval(100 * share, effective, student(degrees)), num_groups)
