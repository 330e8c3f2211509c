"""The scores of all images and classes, for per-class metrics that need a ranking, and for calibration."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.distributed import Process
from utils.log import shown

BYTES_ON_DEVICE = 2**26  # limit for the scores on the device; above it, all scores move to the host
BYTES_AT_ONCE = 2**26  # limit for the scores that processes exchange in one step


class Ranking(NamedTuple):
    """Metrics of each class's ranking of the images by score: float64 [classes], NaN where undefined."""

    average_precision: np.ndarray
    auc: np.ndarray  # area under the receiver operating characteristic


class AllScores:
    """The score of each class for each image of this process."""

    def __init__(self):
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._on_host: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, scores: Tensor, targets: Tensor) -> None:
        """Add scores [B, classes], and labels: class numbers [B]. Most calls do not wait for the device."""
        self._on_device.append((scores.float(), targets))
        if sum(each.nbytes for each, _ in self._on_device) > BYTES_ON_DEVICE:
            self._move()

    def _move(self) -> None:
        if self._on_device:
            scores, targets = (torch.cat(each).cpu().numpy() for each in zip(*self._on_device, strict=True))
            self._on_host.append((scores, targets))
            self._on_device = []

    def on_host(self) -> tuple[np.ndarray, np.ndarray]:
        """Return this process's scores [N, classes], and its labels in the format that `add` takes."""
        self._move()
        if len(self._on_host) > 1:
            self._on_host = [tuple(np.concatenate(each) for each in zip(*self._on_host, strict=True))]
        return self._on_host[0]

    def mean_average_precision(self, process: Process) -> float:
        """Return mAP in percent over the classes that at least one image has, or 0 if there are none. Collective."""
        values = self.ranking(process).average_precision
        values = values[~np.isnan(values)]
        return 100 * math.fsum(values) / len(values) if len(values) else 0.0

    def ranking(self, process: Process, should_stop: Callable[[], bool] = lambda: False) -> Ranking | None:
        """Return the average precision and the AUC of each class, over the images of all processes. Collective.

        The classes are divided among the processes. If `should_stop` returns True in any process, return None soon.
        """
        rows: list[tuple[int, float, float]] = []
        num_classes = self.on_host()[0].shape[1]
        blocks = self._blocks(process)
        if process.is_first:
            blocks = shown(blocks, "ranking", num_classes, size=lambda block: block[1].shape[1], unit="classes")
        for turn, (start, scores, positives) in enumerate(blocks):
            if not process.all_true(not should_stop()):
                return None
            if turn % process.world_size == process.rank:
                for offset, columns in enumerate(zip(scores.T, positives.T, strict=True)):
                    rows.append((start + offset, *rank_class(*columns)))
        _, *columns = (np.array(column) for column in zip(*sorted(process.join(rows)), strict=True))
        return Ranking(*columns)

    def _blocks(self, process: Process) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (first class, scores, whether each image has the class) of all images, a few classes at a time."""
        scores, targets = self.on_host()
        num_images, num_classes = process.join([len(scores)]), scores.shape[1]
        width = max(1, BYTES_AT_ONCE // (9 * max(1, sum(num_images))))
        totals = self.totals(scores)
        for start in range(0, num_classes, width):
            numbers = np.arange(start, min(start + width, num_classes))
            parts = process.join([(scores[:, numbers] - totals, self.has_class(targets, numbers))])
            yield start, *(np.concatenate(each) for each in zip(*parts, strict=True))

    def has_class(self, targets: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return bool [N, len(numbers)]: whether each image has these classes."""
        return targets[:, None] == numbers

    def totals(self, scores: np.ndarray) -> np.ndarray | float:
        """Return what the scores of an image are compared with.

        Their differences are log-probabilities, which still differ between two images whose probabilities are both
        rounded to 1.
        """
        return log_sum_exp(scores)


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """Return float64 [N, 1]: the logarithm of the sum of exp(scores) of each image."""
    largest = np.where(np.isfinite(top := scores.max(1, keepdims=True)), top, 0)
    with np.errstate(over="ignore", divide="ignore"):
        return largest + np.log(np.exp(scores - largest).sum(1, dtype=np.float64, keepdims=True))


def rank_class(scores: np.ndarray, positives: np.ndarray) -> tuple[float, float]:
    """Return average precision and AUC of a class, NaN where undefined. Images with equal scores count together.

    Average precision is the mean of the precisions at the scores of the class's images. AUC is the probability that an
    image of the class has a higher score than an image outside the class. AUC needs at least one image of each kind.
    """
    if not positives.any():
        return math.nan, math.nan
    ends, places = _places(scores, positives)
    gained = np.bincount(places, minlength=len(ends))  # for each score, the number of images of the class that have it
    right = np.cumsum(gained)
    wrong = ends + 1 - right
    num_positives, num_others = int(right[-1]), int(wrong[-1])
    precision = float(np.sum(gained * right / (ends + 1)) / num_positives)
    # For each image of the class, count the other images with a lower score, and half of those with the same score.
    lower = num_others - wrong + np.diff(wrong, prepend=0) / 2
    return precision, float(np.sum(gained * lower) / (num_positives * num_others)) if num_others else math.nan


def precisions_at(scores: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Return the precision at the score of each image of a class. Their mean is the average precision."""
    ends, places = _places(scores, positives)
    return (np.cumsum(np.bincount(places, minlength=len(ends))) / (ends + 1))[places]


def _places(scores: np.ndarray, positives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the last place of each score, highest first, and the number of the score of each image of the class."""
    scores = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    ordered = np.sort(-scores)  # several times as fast as argsort
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    return ends, np.searchsorted(ordered[ends], -scores[positives])
