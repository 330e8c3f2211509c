"""Finds labels that a model doubts on images not used to train it: confident learning (Northcutt et al., 2021)."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNKNOWN = -1  # class number of a prediction that is not a class of the data set
# A label is doubtful if the model predicts another class, and gives the label less than this share of the average
# probability of labels of this class. The labels are sorted by their probability. Measured with small CNNs on five folds
# of the 1,797 digits (accuracy 97% at both rates) and of 2,000 drawn photos (66% and 56%), with 5% and 15% of the
# labels replaced at random; means of three seeds. cl: cleanlab 2.9, find_label_issues with its defaults.
#                                            digits, 5%, 15%   photos, 5%, 15%
#   wrong labels in the list                     99%  100%         78%   58%    cl: 87% 92% 78% 81%
#   right labels in the list (false alarms)      31%   13%         70%   40%    cl:  6%  4% 83% 63%
#   average precision, sorted by probability    0.99  0.99        0.61  0.50    cl: 0.87 0.92 0.59 0.61
#   average precision, sorted by margin         0.98  0.99        0.60  0.51    cl: 0.86 0.92 0.55 0.59
# The margin is the probability of the label minus that of the prediction. On the photos with 15%, it is better with two
# seeds and worse with one (by 0.02 each), so it is not used.
DOUBTFUL_SHARE = 0.5


class Predictions(NamedTuple):
    """Predictions for held-out images, each image once. One table holds all folds of one seed."""

    images: np.ndarray  # int64 [n]: numbers of the images in the data set
    predicted: np.ndarray  # int64 [n]: class numbers
    probabilities: np.ndarray  # float64 [n]: probability of the predicted class
    of_labels: np.ndarray  # float64 [n]: probability of the image's label


class Doubt(NamedTuple):
    """An image whose label is doubtful."""

    image: int
    suggestion: int  # class number
    confidence: float  # mean probability of the suggestion, over the tables that predict it
    of_label: float  # mean probability of the label over all tables; the lowest is the most doubtful


def usual_probabilities(labels: np.ndarray, table: Predictions, num_classes: int) -> np.ndarray:
    """Return for each image the mean probability of the label over the other images of its class.

    The mean includes an extra value, the mean over all classes, so that it is useful for classes with one or two
    images.
    """
    of_images = labels[table.images]
    counts = np.bincount(of_images, minlength=num_classes)
    sums = np.bincount(of_images, table.of_labels, minlength=num_classes)
    return (sums[of_images] - table.of_labels + table.of_labels.mean()) / counts[of_images]


def find_doubts(labels: np.ndarray, tables: Sequence[Predictions], num_classes: int) -> list[Doubt]:
    """Return the images with doubtful labels, the most doubtful first.

    `labels`: class numbers [N]. `tables`: one for each seed. A label is doubtful if more than half of the image's tables doubt it.
    """
    judged, found = np.zeros(len(labels), np.int64), np.zeros(len(labels), np.int64)
    sums = np.zeros(len(labels))
    for table in tables:
        np.add.at(judged, table.images, 1)
        np.add.at(found, table.images, _finds(labels, table, num_classes))
        np.add.at(sums, table.images, table.of_labels)
    doubtful = 2 * found > judged
    votes: dict[int, Counter] = {image: Counter() for image in np.flatnonzero(doubtful).tolist()}
    shares: dict[int, Counter] = {image: Counter() for image in votes}
    for table in tables:
        rows = np.flatnonzero(doubtful[table.images] & _differs(labels, table))
        columns = (each[rows].tolist() for each in table[:3])
        for image, predicted, probability in zip(*columns, strict=True):
            votes[image][predicted] += 1
            shares[image][predicted] += probability
    doubts = []
    for image, counts in votes.items():
        suggestion = max(counts, key=lambda number: (counts[number], shares[image][number]))
        confidence = shares[image][suggestion] / counts[suggestion]
        doubts.append(Doubt(image, suggestion, confidence, float(sums[image] / judged[image])))
    return sorted(doubts, key=lambda doubt: (doubt.of_label, -doubt.confidence, doubt.image))


def _differs(labels: np.ndarray, table: Predictions) -> np.ndarray:
    """Return bool [n]: whether each prediction is a class of the data set, but not the label."""
    return (table.predicted != labels[table.images]) & (table.predicted != UNKNOWN)


def _finds(labels: np.ndarray, table: Predictions, num_classes: int) -> np.ndarray:
    """Return bool [n]: whether each label is doubtful."""
    usual = usual_probabilities(labels, table, num_classes)
    return _differs(labels, table) & (table.of_labels < DOUBTFUL_SHARE * usual)
