"""Sums over the images of an evaluation, which stay on the device until all are in, and the scores made of them."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.scores.average_precision import AllScores
from engine.scores.per_image import PerImage
from engine.scores.scores import Scores
from utils.distributed import Process


class Tally:
    """Exact for any number of processes: sums over images, and with several labels an image all scores."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.sums = torch.zeros(5, dtype=dtype, device=device)  # loss, top-1, top-5, images, excluded
        # The images of each class, those taken for it, and those of it that were; [3, classes] from the first batch on.
        self.counts = torch.zeros(0, dtype=dtype, device=device)
        self.scores: AllScores | None = None
        self.per_image = PerImage()

    def add(self, logits: Tensor, targets: Tensor, num_excluded: int) -> None:
        """Logits [B, classes], float32 or wider; targets as in Batch. B is 0 in a process without images left."""
        if not len(self.counts):
            self.counts = self.sums.new_zeros(3, logits.shape[1])
        best = logits.topk(min(5, logits.shape[1])).indices
        count = self._add_labels if targets.ndim == 2 else self._add_classes
        losses, are_right = count(logits, targets, best)
        self.sums[0] += losses.to(self.sums).sum()
        self.sums[1] += are_right[:, 0].sum()
        self.sums[2] += are_right.any(1).sum()
        self.sums[3] += len(targets)
        self.sums[4] += num_excluded

    def _add_classes(self, logits: Tensor, targets: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """The losses [B], and whether each of the `best` classes is that of the image."""
        self.per_image.add(logits, targets, best[:, 0])
        are_right, ones = best.eq(targets[:, None]), torch.ones_like(targets, dtype=self.counts.dtype)
        counted = ((targets, ones), (best[:, 0], ones), (targets, are_right[:, 0].to(ones)))
        for row, (classes, values) in zip(self.counts, counted, strict=True):
            row.index_add_(0, classes, values)  # bincount would make the host wait
        return functional.cross_entropy(logits, targets, reduction="none"), are_right

    def _add_labels(self, logits: Tensor, targets: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """As `_add_classes`; a class is taken to be there if its probability is above 0.5."""
        self.scores = self.scores or AllScores()
        self.scores.add(logits, targets)
        actual, predicted = targets.bool(), logits > 0
        self.counts += torch.stack([each.sum(0) for each in (actual, predicted, actual & predicted)])
        losses = functional.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1)
        return losses, targets.gather(1, best) > 0

    def result(self, process: Process) -> Scores:
        """The scores over the images of all processes. Waits for the device."""
        values = process.sum(torch.cat((self.sums, self.counts.flatten()))).tolist()
        loss, top1, top5, count, excluded = values[:5]
        total, counts = max(count, 1), np.reshape(values[5:], (3, -1))
        also = macro_scores(*counts)
        if self.scores:
            also |= {"micro_f1": micro_f1(*counts), "map": self.scores.mean_average_precision(process)}
        self.per_image.counts, self.per_image.scores = counts.astype(np.int64), self.scores
        return Scores(loss / total, 100 * top1 / total, 100 * top5 / total, int(count), int(excluded), **also)


def macro_scores(actual: np.ndarray, predicted: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Means of recall and F1 over the classes that have images, in percent; 0 without images."""
    present = actual > 0
    actual, predicted, right = actual[present], predicted[present], right[present]
    if not len(actual):
        return {"macro_recall": 0.0, "macro_f1": 0.0}
    return {
        "macro_recall": 100 * float((right / actual).mean()),
        "macro_f1": 100 * float((2 * right / (actual + predicted)).mean()),
    }


def micro_f1(actual: np.ndarray, predicted: np.ndarray, right: np.ndarray) -> float:
    """F1 over all pairs of image and class, in percent."""
    return 200 * float(right.sum() / max((actual + predicted).sum(), 1))
