"""What each image of an evaluation got: its prediction and probabilities. On the device until somebody asks for it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.scores.average_precision import AllScores
from utils.distributed import Process

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
    """The same where an image can have several labels: a row for each label, and for each class that is predicted."""

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
        kind, mine = (
            (LabelResults, self._labels(*self.scores.on_host())) if self.scores else (ImageResults, self._classes())
        )
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
        assert len(rows) == len(self.indices), (len(rows), len(self.indices))
        labels, predictions = rows[:, :2].T.astype(np.int64)
        return self.indices, labels, predictions, rows[:, 3], rows[:, 2]

    def _labels(self, scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """The columns of LabelResults for the images of this process."""
        assert len(scores) == len(self.indices), (len(scores), len(self.indices))
        kept = scores > 0
        if scores.shape[1] > MOST_PREDICTED:
            kept &= scores >= np.partition(scores, -MOST_PREDICTED, axis=1)[:, -MOST_PREDICTED, None]
        images, classes = np.nonzero(kept | targets)
        chosen = scores[images, classes]
        with np.errstate(over="ignore"):
            probabilities = 1 / (1 + np.exp(-chosen))
        return self.indices, self.indices[images], classes, probabilities, targets[images, classes], chosen > 0
