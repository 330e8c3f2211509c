"""The parts of a fit that differ if an image can have several labels: each class has its own temperature."""

import numpy as np

from extras.calibration.fit import Measured, blocks


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
