"""The temperature of a model's logits: it makes predictions with a probability of 80% right in 80% of all cases."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

FEWEST_IMAGES = 10
LOWEST, HIGHEST = 0.05, 20.0  # bounds of a temperature
# The fit adds a normal prior on log temperature with mean 0 and this standard deviation. With many images, the
# prior has almost no effect. With few images, or if all predictions are right, the likelihood alone would choose a
# temperature near 0. Rejected: smoothed labels as in Platt scaling. With 30 images, they made a good model's loss on
# other images five times larger.
PRIOR_DEVIATION = 0.5
SCORES_AT_ONCE = 2**15  # small enough for the processor's cache
MOST_STEPS, PRECISE_STEP = 60, 1e-5  # Newton's method squares the error, so the next step would be about 1e-10
NUM_BINS = 15
MOST_POINTS = 1000  # maximum number of points on a curve


class Measured(NamedTuple):
    """Probabilities compared with labels: one entry for each image, or for each pair of image and class."""

    confidences: np.ndarray  # float64: the probability of the most probable class, or of the pair
    are_right: np.ndarray  # bool: whether that class is the label, or the image has the label
    losses: np.ndarray  # the negative log-likelihood


class Likelihood:
    """How well probabilities fit the labels of images with one class (softmax).

    engine/tasks/labels.py is for several.
    """

    has_curve = True  # whether an image has one answer, whose confidence can be compared with a threshold

    def num_temperatures(self, num_classes: int) -> int:
        return 1

    def slopes(self, logits: np.ndarray, targets: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and second derivatives of the mean loss by the inverse of each temperature."""
        first = second = np.zeros(1)
        for start, below_top, exponentials in softmax_parts(logits, inverse):
            totals = exponentials.sum(1)
            weighted = exponentials * below_top
            means = weighted.sum(1) / totals
            labels = targets[start : start + len(means)]
            first = first + (means - below_top[np.arange(len(labels)), labels]).sum()
            second = second + (np.einsum("ij,ij->i", weighted, below_top) / totals - means**2).sum()
        return first / len(logits), second / len(logits)

    def measure(self, logits: np.ndarray, targets: np.ndarray, temperature: np.ndarray) -> Measured:
        """Compare the probabilities at this temperature with the labels."""
        parts = []
        for start, below_top, exponentials in softmax_parts(logits, 1 / temperature):
            totals, labels = exponentials.sum(1), targets[start : start + len(below_top)]
            of_labels = below_top[np.arange(len(labels)), labels] / temperature
            parts.append((1 / totals, below_top.argmax(1) == labels, np.log(totals) - of_labels))
        return Measured(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def calibrate(scores: tuple[np.ndarray, np.ndarray] | tuple[()], likelihood: Likelihood) -> dict[str, Any]:
    """Return the calibration as plain numbers and lists, or the reason why there is none."""
    if not scores:
        return {"reason": "there are too many images and classes to keep all logits"}
    logits, targets = scores
    num_images = len(logits)
    if num_images < FEWEST_IMAGES:
        return {"reason": f"there are {num_images} validation images with finite logits, fewer than {FEWEST_IMAGES}"}
    if logits.shape[1] < 2 and likelihood.has_curve:
        return {"reason": "there is only one class"}
    temperature = fit_temperature(logits, targets, likelihood)
    before, after = (likelihood.measure(logits, targets, each) for each in (np.ones(1), temperature))
    bins = {"bins_before": reliability(before), "bins_after": reliability(after)}
    figures = {
        "num_images": num_images,
        "ece_before": expected_error(bins["bins_before"]),
        "ece_after": expected_error(bins["bins_after"]),
        "nll_before": float(before.losses.mean()),
        "nll_after": float(after.losses.mean()),
    }
    return {
        "temperature": float(temperature[0]) if likelihood.has_curve else temperature.tolist(),
        "figures": figures | bins,
        "curve": confidence_curve(after) if likelihood.has_curve else [],
    }


def fit_temperature(logits: np.ndarray, targets: np.ndarray, likelihood: Likelihood) -> np.ndarray:
    """Return the most probable temperature: float64 [1], or [classes] if each class has its own.

    `logits`: [N, classes], all finite; `targets` as in a batch.
    """
    weight = 1 / (PRIOR_DEVIATION**2 * len(logits))

    def derivatives(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inverse = np.exp(at)  # `at`: the logarithm of the inverse temperature
        first, second = likelihood.slopes(logits, targets, inverse)
        return inverse * first + weight * at, inverse * first + inverse**2 * second + weight

    return np.exp(-find_root(derivatives, np.zeros(likelihood.num_temperatures(logits.shape[1]))))


def find_root(derivatives: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], start: np.ndarray) -> np.ndarray:
    """Return a root of the first derivative, or the bound towards which the function decreases.

    This is Newton's method inside a bracket. A step that leaves the bracket or climbs is replaced by a bisection.
    """
    low, high = (np.full_like(start, -np.log(bound)) for bound in (HIGHEST, LOWEST))
    at = start
    for _ in range(MOST_STEPS):
        first, second = derivatives(at)
        low, high = np.where(first < 0, at, low), np.where(first < 0, high, at)
        newton = at - first / np.where(second > 0, second, np.inf)
        is_safe = (second > 0) & (low <= newton) & (newton <= high)
        before, at = at, np.where(is_safe, newton, (low + high) / 2)
        if np.abs(at - before).max() < PRECISE_STEP:
            break
    return at


def blocks(logits: np.ndarray):
    """Yield (index of the first image, float64 logits) for one block of images at a time."""
    size = max(1, SCORES_AT_ONCE // logits.shape[1])
    for start in range(0, len(logits), size):
        yield start, logits[start : start + size].astype(np.float64)


def softmax_parts(logits: np.ndarray, inverse: np.ndarray):
    """Yield (index of the first image, logits minus the largest, their scaled exponentials) for each block."""
    for start, scores in blocks(logits):
        below_top = scores - scores.max(1, keepdims=True)
        yield start, below_top, np.exp(below_top * inverse)


def reliability(measured: Measured) -> list[list[Any]]:
    """Return [mean confidence, share of right answers, count] for each non-empty bin, of 15 bins of equal width."""
    bins = np.minimum((measured.confidences * NUM_BINS).astype(int), NUM_BINS - 1)
    counts, confidences, right = (
        np.bincount(bins, weights, NUM_BINS) for weights in (None, measured.confidences, measured.are_right)
    )
    return [
        [float(confidences[number] / counts[number]), float(right[number] / counts[number]), int(counts[number])]
        for number in np.flatnonzero(counts)
    ]


def expected_error(bins: list[list[Any]]) -> float:
    """Return the expected calibration error (ECE): the mean gap between confidence and share right, by bin count."""
    total = sum(count for _, _, count in bins)
    return sum(abs(confidence - share) * count for confidence, share, count in bins) / total


def confidence_curve(measured: Measured) -> list[list[Any]]:
    """Return [confidence, number of images at or above it, number of these that are right], highest confidence first.

    Each distinct confidence has a point. If there are more than 1,000 points, 1,000 evenly spaced points are kept.
    """
    order = np.argsort(-measured.confidences, kind="stable")
    confidences, right = measured.confidences[order], np.cumsum(measured.are_right[order])
    ends = np.append(np.flatnonzero(np.diff(confidences)), len(order) - 1)  # the last image of each confidence
    if len(ends) > MOST_POINTS:
        ends = ends[np.linspace(0, len(ends) - 1, MOST_POINTS).round().astype(int)]
    return [[float(confidences[end]), int(end) + 1, int(right[end])] for end in ends]
