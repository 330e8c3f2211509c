"""Sums over the images of an evaluation, which stay on the device until all are in, and the scores made of them."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.scores.scores import Scores
from utils.distributed import Process


class Tally:
    """Exact for any number of processes: only sums over images are kept."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.sums = torch.zeros(5, dtype=dtype, device=device)  # loss, top-1, top-5, images, excluded
        self.counts = torch.zeros(0, dtype=dtype, device=device)  # see `_count`

    def add(self, logits: Tensor, targets: Tensor, num_excluded: int) -> None:
        """Logits [B, classes], float32 or wider, of B images; of a process without images left, B is 0."""
        best = logits.topk(min(5, logits.shape[1])).indices
        are_right = best.eq(targets[:, None])
        self.sums[0] += functional.cross_entropy(logits, targets, reduction="none").to(self.sums).sum()
        self.sums[1] += are_right[:, 0].sum()
        self.sums[2] += are_right.sum()
        self.sums[3] += len(targets)
        self.sums[4] += num_excluded
        self._count(targets, best[:, 0], are_right[:, 0], logits.shape[1])

    def _count(self, targets: Tensor, predicted: Tensor, are_right: Tensor, num_classes: int) -> None:
        """[3, classes]: the images of each class, those taken for it, and those of it that were."""
        if not len(self.counts):
            self.counts = self.sums.new_zeros(3, num_classes)
        ones = torch.ones_like(targets, dtype=self.counts.dtype)
        for row, classes, values in zip(
            self.counts, (targets, predicted, targets), (ones, ones, are_right), strict=True
        ):
            row.index_add_(0, classes, values.to(ones))  # bincount would make the host wait

    def scores(self, process: Process) -> Scores:
        """Of the images of all processes. Waits for the device, once."""
        values = process.sum(torch.cat((self.sums, self.counts.flatten()))).tolist()
        loss, top1, top5, count, excluded = values[:5]
        total = max(count, 1)
        return Scores(
            loss / total, 100 * top1 / total, 100 * top5 / total, int(count), int(excluded), **macro_scores(values[5:])
        )


def macro_scores(counts: list[float]) -> dict[str, float]:
    """Means of recall and F1 over the classes that have images, in percent; 0 without images."""
    actual, predicted, right = np.reshape(counts, (3, -1))
    present = actual > 0
    actual, predicted, right = actual[present], predicted[present], right[present]
    if not len(actual):
        return {"macro_recall": 0.0, "macro_f1": 0.0}
    return {
        "macro_recall": 100 * float((right / actual).mean()),
        "macro_f1": 100 * float((2 * right / (actual + predicted)).mean()),
    }
