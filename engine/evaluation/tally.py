"""Sums over the images of an evaluation, what each image got, and the scores made of them; on the device until asked for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.evaluation.scores import Scores
from utils.distributed import Process
from utils.errors import ensure

if TYPE_CHECKING:
    from engine.evaluation.all_scores import AllScores


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
        are_right &= are_finite(logits)[:, None]
        counted = ((targets, ones), (best[:, 0], ones), (targets, are_right[:, 0].to(ones)))
        for row, (classes, values) in zip(self.counts, counted, strict=True):
            row.index_add_(0, classes, values)  # bincount would make the host wait
        return functional.cross_entropy(logits, targets, reduction="none"), are_right

    def _add_labels(self, logits: Tensor, targets: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """The same two where an image can have several labels; a class is taken to be there if its probability is above 0.5."""
        if self.scores is None:
            from engine.evaluation.all_scores import AllScores

            self.scores = AllScores()
        self.scores.add(logits, targets)
        actual, predicted = targets.bool(), logits > 0
        self.counts += torch.stack([each.sum(0) for each in (actual, predicted, actual & predicted)])
        losses = functional.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1)
        return losses, (targets.gather(1, best) > 0) & are_finite(logits)[:, None]

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


def are_finite(logits: Tensor) -> Tensor:
    """Whether each image has an answer: of NaN and infinity, the largest would be any class. -inf excludes a class."""
    return logits.amax(1).isfinite()


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


MOST_PREDICTED = 100  # of several labels an image, those kept: an untrained model predicts half of all classes


@dataclass(frozen=True)
class ImageResults:
    """The images that could be read, in the order of the set, each with one label and one prediction; all arrays [N]."""

    indices: np.ndarray  # of the image in its set
    labels: np.ndarray  # class numbers
    predictions: np.ndarray
    probabilities: np.ndarray  # float32, of the prediction
    label_probabilities: np.ndarray
    counts: np.ndarray  # [3, classes]: images of each class, images taken for it, and those of it that were


@dataclass(frozen=True)
class LabelResults:
    """The images that could be read, each with any number of labels: a row for each label, and for each class that is predicted."""

    indices: np.ndarray  # of all images that could be read
    images: np.ndarray  # the index of the image of each row; rows of an image stand together, the most probable first
    classes: np.ndarray
    probabilities: np.ndarray
    are_labels: np.ndarray  # bool
    are_predicted: np.ndarray
    counts: np.ndarray


class PerImage:
    """Collects the results of the images of this process, in the order of its share."""

    def __init__(self):
        self._rows: list[Tensor] = []  # float32 [B, 4], which holds class numbers up to 16 million
        # Set at the end of the evaluation: which images these are, the counts of all processes, and with several labels
        # an image what there is instead of rows.
        self.indices, self.counts = np.zeros(0, np.int64), np.zeros((3, 0), np.int64)
        self.scores: AllScores | None = None

    def add(self, logits: Tensor, targets: Tensor, predictions: Tensor) -> None:
        """Logits [B, classes], targets and predictions [B]."""
        numbers = torch.stack((targets, predictions), 1)
        self._rows.append(torch.cat((numbers.float(), logits.softmax(1).gather(1, numbers).float()), 1))

    def gather(self, process: Process) -> ImageResults | LabelResults:
        """The results of all processes, in each of them. Waits for the device; a collective."""
        kind = LabelResults if self.scores else ImageResults
        mine = self._labels(*self.scores.on_host()) if self.scores else self._classes()
        parts = process.join([mine])
        together = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        order = np.argsort(together[0], kind="stable")
        if kind is ImageResults:
            return ImageResults(*(each[order] for each in together), self.counts)
        indices, images, *columns = together
        rows = np.lexsort((-columns[1], images))
        return LabelResults(indices[order], images[rows], *(each[rows] for each in columns), self.counts)

    def _classes(self) -> tuple[np.ndarray, ...]:
        """The columns of ImageResults for the images of this process."""
        rows = torch.cat(self._rows).cpu().numpy() if self._rows else np.zeros((0, 4), np.float32)
        ensure(len(rows) == len(self.indices), f"{len(rows)} results of {len(self.indices)} images")
        labels, predictions = rows[:, :2].T.astype(np.int64)
        return self.indices, labels, predictions, rows[:, 3], rows[:, 2]

    def _labels(self, scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """The columns of LabelResults for the images of this process."""
        ensure(len(scores) == len(self.indices), f"{len(scores)} results of {len(self.indices)} images")
        kept = scores > 0
        if scores.shape[1] > MOST_PREDICTED:
            kept &= scores >= np.partition(scores, -MOST_PREDICTED, axis=1)[:, -MOST_PREDICTED, None]
        images, classes = np.nonzero(kept | targets)
        chosen = scores[images, classes]
        with np.errstate(over="ignore"):
            probabilities = 1 / (1 + np.exp(-chosen))
        return self.indices, self.indices[images], classes, probabilities, targets[images, classes], chosen > 0


def widen(tensor: Tensor) -> Tensor:
    """Convert half types to float32; float32 and float64 stay."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, because sums over an epoch exceed float32's digits; float32 on MPS, which has nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64
