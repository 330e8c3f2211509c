"""Confident learning (Northcutt et al., 2021): which labels does a model doubt that was not trained on these images?"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNKNOWN = -1  # the number of a prediction that is no class of the data set


class Predictions(NamedTuple):
    """Predictions for held-out images, each image once. All runs of a cross-validation with one seed are one table."""

    images: np.ndarray  # int64 [n]: numbers of the images in the data set
    predicted: np.ndarray  # int64 [n]: class numbers
    probabilities: np.ndarray  # float64 [n]: of the predicted class
    of_labels: np.ndarray  # float64 [n]: probability of the image's label


class Doubt(NamedTuple):
    """An image whose label is doubtful."""

    image: int
    suggestion: int  # class number
    confidence: float  # mean probability of the suggestion, over the runs that suggest it
    margin: float  # mean probability of the label minus that of the prediction; the lowest is the most doubtful


def thresholds_of(labels: np.ndarray, table: Predictions, num_classes: int) -> np.ndarray:
    """Return for each class the mean probability of the label, over its images. NaN for a class without images."""
    of_images = labels[table.images]
    counts = np.bincount(of_images, minlength=num_classes)
    sums = np.bincount(of_images, table.of_labels, minlength=num_classes)
    return np.divide(sums, counts, out=np.full(num_classes, np.nan), where=counts > 0)


def find_doubts(labels: np.ndarray, tables: Sequence[Predictions], num_classes: int) -> list[Doubt]:
    """Return the images with doubtful labels, the most doubtful first. `labels`: class numbers [N]; one table per seed.

    A table finds an image if it predicts another class with at least the threshold of that class. An image is doubtful
    if more than half of its tables find it.
    """
    judged, found = np.zeros(len(labels), np.int64), np.zeros(len(labels), np.int64)
    margins = np.zeros(len(labels))
    for table in tables:
        np.add.at(judged, table.images, 1)
        np.add.at(found, table.images, _finds(labels, table, num_classes))
        np.add.at(margins, table.images, table.of_labels - table.probabilities)
    doubtful = 2 * found > judged
    votes: dict[int, Counter] = {image: Counter() for image in np.flatnonzero(doubtful).tolist()}
    sums: dict[int, Counter] = {image: Counter() for image in votes}
    for table in tables:
        rows = np.flatnonzero(doubtful[table.images] & (table.predicted != labels[table.images]))
        columns = (each[rows].tolist() for each in table[:3])
        for image, predicted, probability in zip(*columns, strict=True):
            if predicted != UNKNOWN:
                votes[image][predicted] += 1
                sums[image][predicted] += probability
    doubts = []
    for image, counts in votes.items():
        suggestion = max(counts, key=lambda number: (counts[number], sums[image][number]))
        confidence = sums[image][suggestion] / counts[suggestion]
        doubts.append(Doubt(image, suggestion, confidence, float(margins[image] / judged[image])))
    return sorted(doubts, key=lambda doubt: (doubt.margin, doubt.image))


def _finds(labels: np.ndarray, table: Predictions, num_classes: int) -> np.ndarray:
    """Return bool [n]: whether each prediction is another class than the label, and confident enough."""
    thresholds = thresholds_of(labels, table, num_classes)
    is_known = table.predicted != UNKNOWN
    of_predicted = np.where(is_known, thresholds[table.predicted], np.nan)
    return (table.predicted != labels[table.images]) & (table.probabilities >= of_predicted)  # False for NaN
