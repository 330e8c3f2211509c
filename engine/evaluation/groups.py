"""Intervals of scores whose images come in groups: the values of DATA.GROUP_BY, and copies of one photo.

The images of a group are alike, so they say less than as many independent images. Everything here counts groups.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from datasets import ImageSet
from datasets.split.together import group_numbers
from engine.evaluation.image_test import ErrorTest
from engine.evaluation.scores import ByGroups, wilson_interval
from engine.evaluation.student import student
from utils.text import counted

# With fewer groups there is no interval. With 5 groups that differ as much as persons do, and an accuracy from 50 to
# 95%, the intervals of simulated runs had the accuracy of other groups in 91 to 100% of cases, and they are 25 to 80
# points wide (tests/unit/engine/test_groups.py).
FEWEST_GROUPS = 5
MOST_SIGNS = 16  # groups whose signs are all tried: 65,536 combinations


def groups_of(images: ImageSet) -> np.ndarray | None:
    """Return int64 [N]: the number of each image's group, from 0, or None if each image is a group of its own."""
    if not images.is_grouped:
        return None
    numbers = group_numbers(images)
    return None if len(np.unique(numbers)) == len(numbers) else numbers


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


def accuracy_interval(are_right: np.ndarray, groups: np.ndarray) -> ByGroups:
    """Return the interval of the percentage of right images: Wilson's, for as many images as would have the same error.

    `are_right`: bool [N]; `groups`: see groups_of. The accuracy of other groups lies in it, not only of other images of
    these groups.
    """
    num_groups, share = len(np.unique(groups)), float(are_right.mean())
    if num_groups < FEWEST_GROUPS:
        return ByGroups(num_groups)
    error, degrees = standard_error(are_right.astype(np.float64), groups), degrees_of(groups)
    effective = min(share * (1 - share) / error**2, len(groups)) if error else float(len(groups))
    if share in (0, 1):  # the images do not say how alike those of a group are
        effective = degrees + 1
    return ByGroups(num_groups, *wilson_interval(100 * share, effective, student(degrees)))


@dataclass(frozen=True)
class GroupTest:
    """A paired test of two runs on the images that both scored, if these come in groups: one sign for each group."""

    differences: np.ndarray  # float64 [N]: the second run minus the first: right answers, or absolute errors
    groups: np.ndarray  # int64 [N], see groups_of
    is_accuracy: bool

    @property
    def num_images(self) -> int:
        return len(self.differences)

    @property
    def num_groups(self) -> int:
        return len(np.unique(self.groups))

    @property
    def only_first(self) -> int:
        return int((self.differences < 0).sum())

    @property
    def only_second(self) -> int:
        return int((self.differences > 0).sum())

    @property
    def scale(self) -> float:
        return 100.0 if self.is_accuracy else 1.0

    @property
    def value(self) -> float:
        """Return the mean difference: of accuracies in percentage points."""
        return self.scale * float(self.differences.mean())

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95% interval of `value`, or None if there are too few groups."""
        if self.num_groups < FEWEST_GROUPS:
            return None
        error = standard_error(self.differences, self.groups)
        half = self.scale * student(degrees_of(self.groups)) * error
        return self.value - half, self.value + half

    @cached_property
    def p(self) -> float:
        """Return the share of signs of the groups for which the sum is at least as far from 0.

        It is exact for up to MOST_SIGNS groups that differ. Otherwise, the signs are drawn by a seed.
        """
        sums = np.bincount(self.groups, self.differences)
        sums = sums[sums != 0]
        if len(sums) > MOST_SIGNS:
            return ErrorTest(sums).p
        totals = np.zeros(1)
        for value in sums:
            totals = np.concatenate([totals - value, totals + value])
        return float((np.abs(totals) >= abs(sums.sum()) * (1 - 1e-9)).mean())

    def __str__(self) -> str:
        form, unit = ("+.2f", " points") if self.is_accuracy else ("+.4g", "")
        within = f"{self.num_images:,} images in {counted(self.num_groups, 'group')}"
        between = ""
        if self.interval is not None:
            between = f" ({self.interval[0]:{form}} to {self.interval[1]:{form}})"
        return f"{self.value:{form}}{unit} on {within}{between}, p {self.p:.2g}"
