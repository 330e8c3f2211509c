"""Mean, deviation, and whether two groups differ by more than their noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The 97.5% quantile of Student's t for 1 to 30 degrees of freedom; 95% of the values lie between minus and plus that.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample (divided by n - 1); None of fewer than two values."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def student(degrees: float) -> float:
    if degrees < len(STUDENT) + 1:
        return STUDENT[max(int(degrees), 1) - 1]
    return 1.96 + 2.4 / int(degrees)


@dataclass(frozen=True)
class Difference:
    """Of the means of two groups."""

    value: float
    error: float | None  # its standard error; None where a group has one value and says nothing of its noise
    half_width: float | None  # of its 95% interval
    is_paired: bool

    @property
    def is_noise(self) -> bool | None:
        """Whether no difference lies in its 95% interval; None if that is not known."""
        return None if self.half_width is None else abs(self.value) <= self.half_width


def difference(values: Mapping, others: Mapping) -> Difference:
    """values - others, each by what identifies a repetition (its seed and fold).

    Where both groups have the same two or more repetitions the differences are taken pair by pair, which leaves out the noise
    that the pairs share; else as of independent samples of unequal variance (Welch).
    """
    gap = mean(list(values.values())) - mean(list(others.values()))
    if set(values) == set(others) and len(values) > 1:
        error = deviation([values[key] - others[key] for key in values]) / math.sqrt(len(values))
        return Difference(gap, error, student(len(values) - 1) * error, is_paired=True)
    if len(values) < 2 or len(others) < 2:
        return Difference(gap, None, None, is_paired=False)
    parts = [deviation(list(each.values())) ** 2 / len(each) for each in (values, others)]
    error = math.sqrt(sum(parts))
    below = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (values, others), strict=True))
    degrees = error**4 / below if below else len(values) + len(others) - 2
    return Difference(gap, error, student(degrees) * error, is_paired=False)
