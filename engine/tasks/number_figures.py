"""Figures that compare predicted numbers with true ones, each with a 95% interval, and intervals of predictions."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine.evaluation.student import student

PREDICTED = "_predicted"  # the end of the names of columns with predicted numbers
ENDS = ("", "_low", "_high")  # the columns of a figure and its interval end with these
FIGURES = ("mae", "rmse", "r2", "spearman")
DEVIATIONS = 1.96  # half of a 95% interval, in standard errors
# With fewer images, RMSE and R2 get no interval: it would have the figure of all images in less than 88% of cases, also
# if the errors are normal (BENCHMARKS.md, "Numbers"). Spearman's interval would have it with 8 images in 90%, if the
# correlation is 0.95, and with 10 in 94%; for images in perfect order, it would have no width.
FEWEST_IMAGES = 10


class Interval(NamedTuple):
    """A figure and its 95% interval. NaN: not defined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def record(self) -> list[float | None]:
        """Return the three numbers for a JSON file."""
        return [each if math.isfinite(each) else None for each in self]


@np.errstate(invalid="ignore", over="ignore")  # the outputs of a model that has diverged
def measure_errors(
    true: np.ndarray, predicted: np.ndarray, mean: float, groups: np.ndarray | None = None
) -> dict[str, Interval]:
    """Return FIGURES, and the errors of a model that always predicts `mean`.

    float64 [N]; NaN where a number is missing.

    `groups`: the group of each image, see engine/evaluation/groups.py. The intervals count groups.
    """
    known = ~np.isnan(true)
    true, predicted, groups = true[known], predicted[known], None if groups is None else groups[known]
    nothing = Interval(math.nan)
    if not len(true):
        return dict.fromkeys((*FIGURES, "mae_of_mean", "rmse_of_mean"), nothing)
    differences = predicted - true
    squares, spread = differences**2, (true - true.mean()) ** 2
    figures = {
        "mae": ratio_of(np.abs(differences), groups=groups),
        "rmse": Interval(*(math.sqrt(each) for each in ratio_of(squares, FEWEST_IMAGES, groups=groups))),
        "r2": nothing,
        "spearman": rank_correlation(true, predicted, groups),
        "mae_of_mean": Interval(float(np.abs(true - mean).mean())),
        "rmse_of_mean": Interval(float(((true - mean) ** 2).mean() ** 0.5)),
    }
    if spread.any():
        ratio, low, high = ratio_of(squares, FEWEST_IMAGES, spread, groups)
        figures["r2"] = Interval(1 - ratio, 1 - high, 1 - low)
    return figures


def columns_of(figures: Mapping[str, Interval]) -> dict[str, float]:
    """Return the figures of an output, and the ends of their intervals, by the names of columns."""
    return {f"{name}{ENDS[place]}": value for name, each in figures.items() for place, value in enumerate(each)}


def ratio_of(
    values: np.ndarray, fewest: int = 2, others: np.ndarray | None = None, groups: np.ndarray | None = None
) -> Interval:
    """Return the ratio of the sums of two values of images, without an interval if there are too few images.

    `others`: 1 for each image by default. The interval is one of the logarithm: with few images, the ratio is mostly a
    little too small, and sometimes much too large.
    """
    others = np.ones(len(values)) if others is None else others
    ratio, count = float(values.sum() / others.sum()), len(values)
    if groups is not None:
        return _ratio_of_groups(ratio, values, others, fewest, groups)
    if count < fewest or not math.isfinite(ratio):
        return Interval(ratio)
    if not ratio:
        return Interval(ratio, ratio, ratio)
    influence = values / values.mean() - others / others.mean()  # of each image on the logarithm
    factor = math.exp(student(count - 1) * float(influence.std(ddof=1)) / math.sqrt(count))
    return Interval(ratio, ratio / factor, ratio * factor)


def _ratio_of_groups(ratio: float, values: np.ndarray, others: np.ndarray, fewest: int, groups: np.ndarray) -> Interval:
    """Return the ratio with the interval that counts groups."""
    from engine.evaluation.groups import FEWEST_GROUPS, degrees_of, standard_error

    if len(np.unique(groups)) < max(fewest, FEWEST_GROUPS) or not math.isfinite(ratio):
        return Interval(ratio)
    if not ratio:
        return Interval(ratio, ratio, ratio)
    influence = values / values.mean() - others / others.mean()
    factor = math.exp(student(degrees_of(groups)) * standard_error(influence, groups))
    return Interval(ratio, ratio / factor, ratio * factor)


def rank_correlation(true: np.ndarray, predicted: np.ndarray, groups: np.ndarray | None = None) -> Interval:
    """Return Spearman's correlation, with the interval of Bonett and Wright, if there are enough images for one.

    With groups, the interval is as wide as for an image of each group.
    """
    a, b = (ranks(each) - (len(each) + 1) / 2 for each in (true, predicted))
    length = math.sqrt(float((a**2).sum()) * float((b**2).sum()))
    if not (length > 0 and np.isfinite(predicted).all()):
        return Interval(math.nan)
    value = float((a * b).sum()) / length
    count = len(true) if groups is None else len(np.unique(groups))
    if count < FEWEST_IMAGES or abs(value) >= 1:
        return Interval(value)
    half = DEVIATIONS * math.sqrt((1 + value**2 / 2) / (count - 3))
    return Interval(value, *(math.tanh(math.atanh(value) + side * half) for side in (-1, 1)))


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]


FEWEST_GROUPS = 3  # with fewer, an interval for images of other groups is a guess


def grouped_half_widths(errors: np.ndarray, share: float, groups: np.ndarray) -> list[float | None]:
    """Return half_widths for images of other groups. `groups`: the number of each image's group.

    Each group counts once, because the errors of its images are alike. Few groups show the spread of all groups only
    roughly, so the width grows as a 90% interval by Student's t does.
    """
    widths = []
    for column in errors.T:
        known = np.flatnonzero(~np.isnan(column))
        known = known[np.argsort(column[known])]
        _, members, sizes = np.unique(groups[known], return_inverse=True, return_counts=True)
        count, width = len(sizes), None
        if count >= FEWEST_GROUPS:
            reached = np.cumsum(1 / sizes[members]) / count
            place = min(int(np.searchsorted(reached, share - 1e-9)), len(known) - 1)
            # The expansion of Cornish and Fisher: the 95% quantile of Student's t with `count` degrees of freedom,
            # divided by the quantile of a normal distribution.
            growth = 1 + 0.926 / count + 0.864 / count**2 + 0.597 / count**3
            width = float(column[known[place]]) * growth
        widths.append(width)
    return widths


def half_widths(errors: np.ndarray, share: float) -> list[float | None]:
    """Return for each output how far true numbers of this share of other images are from the predicted ones, at most.

    `errors`: absolute errors [N, outputs], NaN where a number is missing. None: there are too few images. For images
    that are exchangeable with these, the share lies on average between `share` and `share` + 1 / (N + 1).
    """
    widths = []
    for column in errors.T:
        known = np.sort(column[~np.isnan(column)])
        place = math.ceil((len(known) + 1) * share - 1e-9)
        widths.append(float(known[place - 1]) if 0 < place <= len(known) else None)
    return widths


def shares_of_images(table: np.ndarray) -> np.ndarray:
    """Return float64 [N] from values [N, outputs], NaN where one is missing.

    Its mean is the mean of the outputs' means.
    """
    counts = (~np.isnan(table)).sum(0)
    weights = len(table) / np.maximum(counts, 1) / max((counts > 0).sum(), 1)
    return np.nansum(table * weights, axis=1)


def plain(value: float) -> float | str:
    """Return a number with six significant digits for a table, where a text with a minus sign is a formula; or ""."""
    return float(f"{value:.6g}") if math.isfinite(value) else ""


def decimals_of(width: float, digits: int) -> int:
    """Return how many decimal places show this number of digits of a width."""
    return digits - 1 - math.floor(math.log10(width))
