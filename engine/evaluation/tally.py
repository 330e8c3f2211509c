"""Sums losses and counts over the images of an evaluation, keeps the results of each image, and computes the scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.evaluation.all_scores import AllScores, Ranking
from engine.evaluation.scores import Scores
from utils.distributed import Process
from utils.errors import ensure

# Above this number of scores (images x classes), an evaluation keeps all scores only if images can have several
# labels. 2**26 float32 scores take 256 MiB: ImageNet's validation images need 191 MiB.
MOST_SCORES = 2**26


class Tally:
    """An accumulator of scores that is exact for any number of processes.

    It keeps sums over the images, and the scores of all classes for each image, up to MOST_SCORES.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, num_images: int):
        """`num_images` is the number of images that all processes together will add."""
        self.sums = torch.zeros(5, dtype=dtype, device=device)  # loss, top-1, top-5, images, excluded
        # Numbers of images, predictions and correct predictions of each class: [3, classes] from the first batch on.
        self.counts = torch.zeros(0, dtype=dtype, device=device)
        self.num_images, self.has_several_labels = num_images, False
        self.per_image = PerImage()

    def add(self, logits: Tensor, targets: Tensor, num_excluded: int) -> None:
        """Add a batch: logits [at least B, classes], targets of B images as in Batch.

        B is 0 in a process that has no images left.
        """
        logits = widen(logits[: len(targets)])
        if not len(self.counts):
            self.counts, self.has_several_labels = self.sums.new_zeros(3, logits.shape[1]), targets.ndim == 2
            if self.has_several_labels or self.num_images * logits.shape[1] <= MOST_SCORES:
                self.per_image.scores = AllScores()
        if self.per_image.scores:
            self.per_image.scores.add(logits, targets)
        best = logits.topk(min(5, logits.shape[1])).indices
        count = self._add_labels if self.has_several_labels else self._add_classes
        losses, are_right = count(logits, targets, best)
        self.sums[0] += losses.to(self.sums).sum()
        self.sums[1] += are_right[:, 0].sum()
        self.sums[2] += are_right.any(1).sum()
        self.sums[3] += len(targets)
        self.sums[4] += num_excluded

    def _add_classes(self, logits: Tensor, targets: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Count the images. Return the losses [B], and whether each of the `best` classes is correct."""
        self.per_image.add(logits, targets, best[:, 0])
        are_right, ones = best.eq(targets[:, None]), torch.ones_like(targets, dtype=self.counts.dtype)
        are_right &= are_finite(logits)[:, None]
        counted = ((targets, ones), (best[:, 0], ones), (targets, are_right[:, 0].to(ones)))
        for row, (classes, values) in zip(self.counts, counted, strict=True):
            row.index_add_(0, classes, values)  # not bincount, because it would make the host wait
        return functional.cross_entropy(logits, targets, reduction="none"), are_right

    def _add_labels(self, logits: Tensor, targets: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Count images with several labels, like `_add_classes`. Classes with a probability above 0.5 are predicted."""
        actual, predicted = targets.bool(), logits > 0
        self.counts += torch.stack([each.sum(0) for each in (actual, predicted, actual & predicted)])
        losses = functional.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1)
        return losses, (targets.gather(1, best) > 0) & are_finite(logits)[:, None]

    def result(self, process: Process) -> Scores:
        """Return the scores over the images of all processes. This waits for the device."""
        values = process.sum(torch.cat((self.sums, self.counts.flatten()))).tolist()
        loss, top1, top5, count, excluded = values[:5]
        total, counts = max(count, 1), np.reshape(values[5:], (3, -1))
        also = macro_scores(*counts)
        if self.has_several_labels:
            also |= {"micro_f1": micro_f1(*counts), "map": self.per_image.scores.mean_average_precision(process)}
        self.per_image.counts, self.per_image.has_several_labels = counts.astype(np.int64), self.has_several_labels
        return Scores(loss / total, 100 * top1 / total, 100 * top5 / total, int(count), int(excluded), **also)


class Scoring(NamedTuple):
    """What the outputs of a model are compared with, and who adds up the results."""

    tally: Callable[[torch.device, torch.dtype, int], Any]  # makes an object with the methods of Tally
    targets_of: Callable[[Tensor, Tensor], Any]  # returns targets for images and their labels


OF_CLASSES = Scoring(Tally, lambda images, labels: labels)


def are_finite(logits: Tensor) -> Tensor:
    """Return whether the largest logit of each image is finite. NaN and infinity would predict an arbitrary class.

    Single logits of -inf are allowed; they exclude a class.
    """
    return logits.amax(1).isfinite()


def macro_scores(actual: np.ndarray, predicted: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return the means of recall and F1 over the classes that have images, in percent, or 0 if there are no images."""
    present = actual > 0
    actual, predicted, right = actual[present], predicted[present], right[present]
    if not len(actual):
        return {"macro_recall": 0.0, "macro_f1": 0.0}
    return {
        "macro_recall": 100 * float((right / actual).mean()),
        "macro_f1": 100 * float((2 * right / (actual + predicted)).mean()),
    }


def micro_f1(actual: np.ndarray, predicted: np.ndarray, right: np.ndarray) -> float:
    """Return F1 over all pairs of image and class, in percent."""
    return 200 * float(right.sum() / max((actual + predicted).sum(), 1))


# The limit on predicted classes per image with several labels. An untrained model predicts half of all classes.
MOST_PREDICTED = 100


@dataclass(frozen=True)
class ImageResults:
    """The results of each readable image, if an image has one label: arrays [N] in the order of the image set."""

    indices: np.ndarray  # the index of each image in its set
    labels: np.ndarray  # class numbers
    predictions: np.ndarray
    probabilities: np.ndarray  # float32: the probabilities of the predicted classes
    label_probabilities: np.ndarray
    counts: np.ndarray  # [3, classes]: images, predictions and correct predictions of each class
    local: "PerImage | None" = None  # this process's results, with all scores of its images if kept
    ranking: Ranking | None = None  # None: not computed yet


@dataclass(frozen=True)
class LabelResults:
    """The results of all readable images with any number of labels: a row for each label and each predicted class."""

    indices: np.ndarray  # the indices of all readable images
    images: np.ndarray  # the index of the image of each row; rows of an image are adjacent, the most probable first
    classes: np.ndarray
    probabilities: np.ndarray
    are_labels: np.ndarray  # bool
    are_predicted: np.ndarray
    counts: np.ndarray
    local: "PerImage | None" = None
    ranking: Ranking | None = None


class PerImage:
    """The results of each image of this process, in the order of its share."""

    def __init__(self):
        self._rows: list[Tensor] = []  # float32 [B, 4]; float32 is exact for class numbers up to 16 million
        self.scores: AllScores | None = None  # None if there are too many; used instead of `_rows` with several labels
        self.features: list[tuple] = []  # of some of the images, for each batch; only FeatureTally keeps them
        # Set at the end of the evaluation: the indices of these images, and the counts of all processes.
        self.indices, self.counts, self.has_several_labels = np.zeros(0, np.int64), np.zeros((3, 0), np.int64), False

    def add(self, logits: Tensor, targets: Tensor, predictions: Tensor) -> None:
        """Add a batch: logits [B, classes], targets [B] and predictions [B]."""
        numbers = torch.stack((targets, predictions), 1)
        self._rows.append(torch.cat((numbers.float(), logits.softmax(1).gather(1, numbers).float()), 1))

    def gather(self, process: Process) -> ImageResults | LabelResults:
        """Return the results of all processes in each process. This is a collective that waits for the device."""
        mine = self._labels(*self.scores.on_host()) if self.has_several_labels else self._classes()
        parts = process.join([mine])
        together = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        order = np.argsort(together[0], kind="stable")
        if not self.has_several_labels:
            return ImageResults(*(each[order] for each in together), self.counts, self)
        indices, images, *columns = together
        rows = np.lexsort((-columns[1], images))
        return LabelResults(indices[order], images[rows], *(each[rows] for each in columns), self.counts, self)

    def _classes(self) -> tuple[np.ndarray, ...]:
        """Return the columns of ImageResults for the images of this process."""
        rows = torch.cat(self._rows).cpu().numpy() if self._rows else np.zeros((0, 4), np.float32)
        ensure(len(rows) == len(self.indices), f"there are {len(rows)} results for {len(self.indices)} images")
        labels, predictions = rows[:, :2].T.astype(np.int64)
        return self.indices, labels, predictions, rows[:, 3], rows[:, 2]

    def _labels(self, scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the columns of LabelResults for the images of this process."""
        ensure(len(scores) == len(self.indices), f"there are {len(scores)} results for {len(self.indices)} images")
        kept = scores > 0
        if scores.shape[1] > MOST_PREDICTED:
            kept &= scores >= np.partition(scores, -MOST_PREDICTED, axis=1)[:, -MOST_PREDICTED, None]
        images, classes = np.nonzero(kept | targets)
        chosen = scores[images, classes]
        with np.errstate(over="ignore"):
            probabilities = 1 / (1 + np.exp(-chosen))
        return self.indices, self.indices[images], classes, probabilities, targets[images, classes], chosen > 0


def widen(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor as float32, and any other tensor unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return float64, because float32 is not precise enough for sums over an epoch. MPS has only float32."""
    return torch.float32 if device.type == "mps" else torch.float64
