"""The scores of all images and classes, which the mean average precision needs if images have several labels."""

import math

import numpy as np
import torch
from torch import Tensor

from utils.distributed import Process

BYTES_ON_DEVICE = 2**26  # limit for the scores on the device; above it, all scores move to the host
BYTES_AT_ONCE = 2**26  # limit for the scores that processes exchange in one step


class AllScores:
    """The score of each class for each image of this process."""

    def __init__(self):
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._on_host: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, scores: Tensor, targets: Tensor) -> None:
        """Add scores and labels, both [B, classes]. This waits for the device only once in many batches."""
        self._on_device.append((scores.float(), targets.bool()))
        if sum(each.nbytes for each, _ in self._on_device) > BYTES_ON_DEVICE:
            self._move()

    def _move(self) -> None:
        if self._on_device:
            scores, targets = (torch.cat(each).cpu().numpy() for each in zip(*self._on_device, strict=True))
            self._on_host.append((scores, targets))
            self._on_device = []

    def on_host(self) -> tuple[np.ndarray, np.ndarray]:
        """Return this process's scores and labels, both [N, classes]."""
        self._move()
        if len(self._on_host) > 1:
            self._on_host = [tuple(np.concatenate(each) for each in zip(*self._on_host, strict=True))]
        return self._on_host[0]

    def mean_average_precision(self, process: Process) -> float:
        """Return mAP in percent over the classes that at least one image has, or 0 if there are none.

        Each process computes some of the classes.
        """
        scores, targets = self.on_host()
        num_images, num_classes = process.join([len(scores)]), scores.shape[1]
        width = max(1, BYTES_AT_ONCE // (5 * max(1, sum(num_images))))
        found: list[float] = []
        for turn, start in enumerate(range(0, num_classes, width)):
            block = slice(start, start + width)
            parts = process.join([(scores[:, block], targets[:, block])])
            if turn % process.world_size == process.rank:
                together = [np.concatenate(each) for each in zip(*parts, strict=True)]
                classes = zip(*(each.T for each in together), strict=True)
                found += [average_precision(*each) for each in classes if each[1].any()]
        found = process.join(found)
        return 100 * math.fsum(found) / len(found) if found else 0.0


def average_precision(scores: np.ndarray, positives: np.ndarray) -> float:
    """Return the average precision of a class: the mean of the precisions at the scores of its images.

    Images with equal scores count together.
    """
    scores = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # the last image of each score
    right = np.cumsum(positives[order])[ends]
    return float(np.sum(np.diff(right, prepend=0) * right / (ends + 1)) / right[-1])
