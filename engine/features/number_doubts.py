"""Doubtful numbers: those that differ most from what a model's features predict.

A ridge regression of the features predicts the number of each image from all other images, as for labels (doubts.py).
Copies are predicted together, from other images.
How many numbers are wrong cannot be said: the errors of right numbers have no known distribution.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from engine.features.doubts import PENALTIES, components, group_copies, mean_of_copies
from engine.features.linear import leave_one_out

MOST_LISTED = 0.05  # share of the images that are listed at most
TIMES = 3.0  # a doubtful number has an error of more than so many median errors


class NumberDoubts(NamedTuple):
    """The judgement of the numbers of one output: arrays [N]. NaN: not judged."""

    predicted: np.ndarray  # float64, from the other images
    errors: np.ndarray  # the number minus the predicted one

    @property
    def is_judged(self) -> np.ndarray:
        return np.isfinite(self.errors)

    @property
    def mean_error(self) -> float:
        return float(np.nanmean(np.abs(self.errors))) if self.is_judged.any() else math.nan

    @property
    def ranked(self) -> np.ndarray:
        """Return the numbers of the images with doubtful numbers, the largest error first."""
        sizes = np.nan_to_num(np.abs(self.errors), nan=-1.0)
        order = np.argsort(-sizes, kind="stable")[: int(MOST_LISTED * self.is_judged.sum())]
        return order[sizes[order] > TIMES * np.median(sizes[self.is_judged])] if len(order) else order


def judge_numbers(values: np.ndarray, features: np.ndarray) -> NumberDoubts:
    """Judge values [N], NaN where one is missing, by features [N, D], where a row of NaN means that there are none."""
    found = NumberDoubts(np.full(len(values), np.nan), np.full(len(values), np.nan))
    rows = np.flatnonzero(np.isfinite(values) & np.isfinite(features).all(1))
    true = values[rows]
    if len(rows) < 2 or true.min() == true.max():
        return found
    copies = group_copies(features[rows])
    firsts = np.unique(copies, return_index=True)[1]
    parts = components(torch.from_numpy(features[rows[firsts]]))
    if not len(parts[0]):  # all images have equal features
        return found
    targets = mean_of_copies(torch.from_numpy(true)[:, None], copies)
    tried = (each[:, 0].numpy()[copies] for each in leave_one_out(parts, targets, PENALTIES))
    found.predicted[rows] = min(tried, key=lambda each: float(np.abs(each - true).mean()))
    found.errors[rows] = true - found.predicted[rows]
    return found
