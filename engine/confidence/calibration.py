"""Calibrates the best weights of a run before they are saved, and stores the result in its checkpoints.

A temperature is fitted to the logits of the validation images, so that the model is right 80% of the time when it gives
its predicted class a probability of 80%.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.checkpoint.async_saver import BEST
from engine.checkpoint.format import CALIBRATION, progress_in
from engine.evaluation.tally import ImageResults, LabelResults
from engine.train.callback import Callback
from engine.train.counters import EpochResult
from engine.train.trainer import Trainer
from models.weights.state import KNOWN
from utils.distributed import Process
from utils.log import Log

MOST_SCORES, MOST_IMAGES = 2**22, 2**17  # more images do not make the temperature noticeably more precise
FEWEST_IMAGES = 10
HASH = 2654435761  # the factor of Knuth's multiplicative hash


class Calibration(Callback):
    """Fits a temperature to each new best evaluation. Every process has this callback, and the same result."""

    def __init__(self, folder: Path, log: Log, trainer: Trainer, saved: dict[str, Any]):
        """`folder`: the folder of the run; `saved`: the state in the checkpoint that the run continues from."""
        self._best_file, self._log, self._state = folder / BEST, log, saved
        trainer.parts[CALIBRATION] = self

    def state(self) -> dict[str, Any]:
        """Return the calibration of the best epoch, or {} if there is none yet."""
        return self._state

    def fit(self, trainer: Trainer, images: ImageResults | LabelResults) -> None:
        best, process, scores = trainer.best, trainer.process, gather_scores(images, trainer.process)
        weights = {"epoch": best.epoch, "step": trainer.step, "weights": f"state_dict{best.suffix}"}
        self._state = process.first(lambda: weights | calibrate(scores))
        if "reason" in self._state:
            self._log.note(f"the best weights are not calibrated, because {self._state['reason']}")
        if trainer.config.learns_strangers and self._state.get("curve"):
            from engine.confidence.fit import learn

            self._state[KNOWN] = learn(images, trainer, self._state["temperature"])
            if reason := self._state[KNOWN].get("reason"):
                self._log.note(f"-unknown will not compare photos with the validation images, because {reason}")

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        best, process = trainer.best, trainer.process
        if result.images is not None:
            self.fit(trainer, result.images)
        elif best.exists and best.epoch != self._state.get("epoch"):
            # The run was killed after it wrote best.pth, or the last best.pth could not be written.
            found = process.first(lambda: progress_in(self._best_file).get(CALIBRATION))
            self._state = found or {"epoch": best.epoch}


def gather_scores(images: ImageResults | LabelResults, process: Process) -> tuple[np.ndarray, np.ndarray] | tuple[()]:
    """Return the logits and targets of all processes in the order of the image set. Collective.

    If there are too many images, only a subset is used, chosen by a hash of the index. Images whose logits are not
    all finite are left out. If the evaluation kept no logits, return an empty tuple.
    """
    local = images.local
    if local.scores is None:
        return ()
    logits, targets = local.scores.on_host()
    num_images = len(images.indices)
    every = max(1, -(-num_images * logits.shape[1] // MOST_SCORES), -(-num_images // MOST_IMAGES))
    chosen = local.indices * HASH % 2**32 < 2**32 // every
    parts = process.join([(local.indices[chosen], logits[chosen], targets[chosen])])
    indices, logits, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(indices, kind="stable")
    order = order[np.isfinite(logits[order]).all(1)]
    return logits[order], targets[order]


def calibrate(scores: tuple[np.ndarray, np.ndarray] | tuple[()]) -> dict[str, Any]:
    """Return the calibration as plain numbers and lists, or the reason why there is none."""
    if not scores:
        return {"reason": "there are too many images and classes to keep all logits"}
    logits, targets = scores
    num_images, has_several_labels = len(logits), targets.ndim == 2
    if num_images < FEWEST_IMAGES:
        return {"reason": f"there are {num_images} validation images with finite logits, fewer than {FEWEST_IMAGES}"}
    if logits.shape[1] < 2 and not has_several_labels:
        return {"reason": "there is only one class"}
    temperature = fit_temperature(logits, targets)
    before, after = measure(logits, targets, np.ones(1)), measure(logits, targets, temperature)
    bins = {"bins_before": reliability(before), "bins_after": reliability(after)}
    figures = {
        "num_images": num_images,
        "ece_before": expected_error(bins["bins_before"]),
        "ece_after": expected_error(bins["bins_after"]),
        "nll_before": float(before.losses.mean()),
        "nll_after": float(after.losses.mean()),
    }
    return {
        "temperature": temperature.tolist() if has_several_labels else float(temperature[0]),
        "figures": figures | bins,
        "curve": [] if has_several_labels else confidence_curve(after),
    }


# --- the temperature ---

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


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the most probable temperature: float64 [1], or [classes] if images can have several labels.

    `logits`: [N, classes], all finite; `targets`: class numbers [N], or bool [N, classes] with several labels.
    """
    slopes = slopes_of_labels if targets.ndim == 2 else slopes_of_classes
    weight = 1 / (PRIOR_DEVIATION**2 * len(logits))

    def derivatives(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inverse = np.exp(at)  # `at`: the logarithm of the inverse temperature
        first, second = slopes(logits, targets, inverse)
        return inverse * first + weight * at, inverse * first + inverse**2 * second + weight

    return np.exp(-find_root(derivatives, np.zeros(logits.shape[1] if targets.ndim == 2 else 1)))


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


def slopes_of_classes(logits: np.ndarray, targets: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and second derivatives [1] of the mean negative log-likelihood by the inverse temperature."""
    first = second = np.zeros(1)
    for start, below_top, exponentials in softmax_parts(logits, inverse):
        totals = exponentials.sum(1)
        weighted = exponentials * below_top
        means = weighted.sum(1) / totals
        labels = targets[start : start + len(means)]
        first = first + (means - below_top[np.arange(len(labels)), labels]).sum()
        second = second + (np.einsum("ij,ij->i", weighted, below_top) / totals - means**2).sum()
    return first / len(logits), second / len(logits)


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


class Measured(NamedTuple):
    """Probabilities compared with labels: one entry for each image, or for each pair of image and class."""

    confidences: np.ndarray  # float64: the probability of the most probable class, or of the pair
    are_right: np.ndarray  # bool: whether that class is the label, or the image has the label
    losses: np.ndarray  # the negative log-likelihood


def measure(logits: np.ndarray, targets: np.ndarray, temperature: np.ndarray) -> Measured:
    """Compare the probabilities at this temperature with the labels."""
    if targets.ndim == 2:
        return measure_labels(logits, targets, temperature)
    found = []
    for start, below_top, exponentials in softmax_parts(logits, 1 / temperature):
        totals, labels = exponentials.sum(1), targets[start : start + len(below_top)]
        of_labels = below_top[np.arange(len(labels)), labels] / temperature
        found.append((1 / totals, below_top.argmax(1) == labels, np.log(totals) - of_labels))
    return Measured(*(np.concatenate(column) for column in zip(*found, strict=True)))


def reliability(measured: Measured) -> list[list[Any]]:
    """Return [mean confidence, share of right answers, count] for each non-empty bin, of 15 bins of equal width."""
    bins = np.minimum((measured.confidences * NUM_BINS).astype(int), NUM_BINS - 1)
    counts, confidences, right = (
        np.bincount(bins, weights, NUM_BINS) for weights in (None, measured.confidences, measured.are_right)
    )
    return [
        [float(confidences[each] / counts[each]), float(right[each] / counts[each]), int(counts[each])]
        for each in np.flatnonzero(counts)
    ]


def expected_error(bins: list[list[Any]]) -> float:
    """Return the expected calibration error: the mean gap between confidence and share right, weighted by bin count."""
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


# --- several labels per image ---


def slopes_of_labels(logits: np.ndarray, targets: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and second derivatives of each class's mean loss by its inverse temperature, each [classes]."""
    first = second = np.zeros(len(inverse))
    for start, scores in blocks(logits):
        chances = sigmoid(scores * inverse)
        first = first + (scores * (chances - targets[start : start + len(scores)])).sum(0)
        second = second + (scores**2 * chances * (1 - chances)).sum(0)
    return first / len(logits), second / len(logits)


def sigmoid(scores: np.ndarray) -> np.ndarray:
    decayed = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1, decayed) / (1 + decayed)


def measure_labels(logits: np.ndarray, targets: np.ndarray, temperature: np.ndarray) -> Measured:
    """Compare the probability of each pair of image and class with the labels."""
    found = []
    for start, scores in blocks(logits):
        scaled, labels = scores / temperature, targets[start : start + len(scores)]
        losses = np.logaddexp(0, scaled) - scaled * labels
        found.append((sigmoid(scaled).ravel(), labels.ravel(), losses.ravel()))
    return Measured(*(np.concatenate(column) for column in zip(*found, strict=True)))
