"""Computes mean and deviation, and tests whether two groups differ by more than the noise of seeds or of images."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.evaluation.student import student


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean and standard deviation of a sample as text: 98.50 ± 0.25, or '-' if there are no values."""
    if not values:
        return "-"
    width = f" ± {np.std(values, ddof=1):,.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):,.{digits}f}{width}"


@dataclass(frozen=True)
class Difference:
    """The difference of the means of two groups."""

    value: float
    error: float | None  # standard error of `value`; None if a group has only one value, because its noise is unknown
    half_width: float | None  # half the width of the 95% interval; None if `error` is None
    is_paired: bool

    @property
    def is_noise(self) -> bool | None:
        """Return whether the 95% interval contains zero, or None if the interval is not known."""
        return None if self.half_width is None else abs(self.value) <= self.half_width


def difference(values: Mapping, others: Mapping) -> Difference:
    """Return the difference of the means, values - others. The keys identify repetitions (seed and fold).

    If both groups have the same two or more repetitions, the differences are taken pair by pair. This removes the noise
    that the pairs share. Otherwise the groups are independent samples of unequal variance (Welch).
    """
    one, other = list(values.values()), list(others.values())
    gap = float(np.mean(one) - np.mean(other))
    if set(values) == set(others) and len(one) > 1:
        error = float(np.std([values[key] - others[key] for key in values], ddof=1)) / math.sqrt(len(one))
        return Difference(gap, error, student(len(one) - 1) * error, is_paired=True)
    if len(one) < 2 or len(other) < 2:
        return Difference(gap, None, None, is_paired=False)
    parts = [np.var(each, ddof=1) / len(each) for each in (one, other)]
    error = math.sqrt(sum(parts))
    below = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    degrees = error**4 / below if below else len(one) + len(other) - 2
    return Difference(gap, error, student(degrees) * error, is_paired=False)


# The limit of a comparison if one side has a single run.
ONE_RUN = (
    "A single run says nothing about its settings, only about its weights; repeat each run with -seed 1, -seed 2 ... "
    "to compare settings"
)
EQUAL, BETTER, WORSE = "inconclusive", "better", "worse"


def verdict(value: float, is_noise: bool | None, smaller_is_better: bool) -> str:
    """Return the verdict on the second of two groups, given its mean minus the first's.

    `is_noise`: None if unknown.
    """
    if is_noise in (True, None):
        return EQUAL
    return BETTER if (value < 0) == smaller_is_better else WORSE
