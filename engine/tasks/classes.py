"""The task of most runs: each image has one class."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from datasets import ImageSet, Mixed, dominant_class
from engine.confidence.temperature import Likelihood, calibrate
from engine.evaluation.all_scores import AllScores
from engine.evaluation.scores import Scores
from engine.evaluation.tally import joined
from engine.precision import are_finite, widen
from engine.tasks.class_tables import MOST_SCORES, ClassResults, Names, evenly, format_share
from engine.tasks.task import Task
from engine.train.loss import DistillationTargets
from utils.distributed import Process
from utils.errors import ensure
from utils.text import counted

if TYPE_CHECKING:
    from engine.features.linear import LinearClassifier


class ClassTask(Task):
    """Each image has one class, and the model predicts the probability of each class."""

    likelihood = Likelihood()  # how calibration measures probabilities
    answers_are = "probabilities"  # the name of the output of a graph with preprocessing
    # The largest allowed difference between a probability of a graph and the model's. Single pixels may differ by 1.
    most_difference = 5e-3

    @property
    def tally(self) -> type["ClassTally"]:
        return ClassTally

    def are_right(
        self, outputs: Tensor | tuple[Tensor, Tensor], targets: Tensor | Mixed | DistillationTargets
    ) -> Tensor:
        if isinstance(outputs, tuple):  # the logits of two heads; their mean is the prediction
            outputs = outputs[0] + outputs[1]
        classes = dominant_class(targets.labels if isinstance(targets, DistillationTargets) else targets)
        return self.is_class(outputs.argmax(1), classes)

    def is_class(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return bool [B]: whether each predicted class is a class of its image."""
        return predictions.eq(targets)

    def fit_head(self, features: Tensor, targets: Tensor, num_outputs: int) -> "LinearClassifier":
        from engine.features.linear import fit_linear

        return fit_linear(features, targets, num_outputs, self.start_loss)

    def start_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the linear classifier with which a new head starts."""
        return functional.cross_entropy(logits, targets)

    def calibrate(self, scores: tuple[np.ndarray, np.ndarray] | tuple[()]) -> dict[str, Any]:
        return calibrate(scores, self.likelihood)

    def describe_scored(self, eval_set: ImageSet) -> str:
        number, total = int(eval_set.count_classes().astype(bool).sum()), counted(len(eval_set.classes), "class")
        return total if number == len(eval_set.classes) else f"{number} of {total}"

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class: [B, classes]."""
        return logits.softmax(-1)

    def answers(self, probabilities: Tensor, most: int | None) -> list[list[tuple[int, float]]]:
        """Return (number of a class, its probability) of the answer to each image, or of the `most` likely classes."""
        best = probabilities.topk(min(most or 1, probabilities.shape[1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[*zip(*row, strict=True)] for row in rows]

    def answer(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the answer to one image for a comparison: [1], or [labels]."""
        return np.atleast_1d(probabilities.argmax())

    def truth(self, images: ImageSet, index: int) -> np.ndarray:
        """Return the right answer to an image, in the form of `answer`."""
        return images.targets[index : index + 1]

    def difference(self, before: np.ndarray, after: np.ndarray) -> float:
        """Return how much two answers differ."""
        return float(np.abs(before - after).max())

    def cost(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return how much less probable the answer of `after` is than that of `before`, in the eyes of `before`."""
        return before.max() - before[self.answer(after)]


# --- the results of images ---


@dataclass(frozen=True)
class ImageResults(ClassResults):
    """The results of images with one class: arrays [N] in the order of the image set."""

    labels: np.ndarray  # class numbers
    predictions: np.ndarray
    probabilities: np.ndarray  # float32: the probabilities of the predicted classes
    label_probabilities: np.ndarray
    has_matrix = True

    def rows(self, image_set: ImageSet, names: Names) -> Iterator[tuple[str, ...]]:
        columns = self.indices, self.labels, self.predictions, self.probabilities, self.label_probabilities
        for index, label, prediction, *shares in zip(*(each.tolist() for each in columns), strict=True):
            yield image_set.table_name(index), names[label], names[prediction], *map(format_share, shares)

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num_classes = self.counts.shape[1]
        numbers, counts = np.unique(self.labels * num_classes + self.predictions, return_counts=True)
        return *np.divmod(numbers, max(num_classes, 1)), counts

    def errors(self, classes: Sequence[str], most: int) -> tuple[int, list[tuple[int, list[str]]]]:
        """Return the number of mistakes, and (image index, caption) of the most confident ones."""
        names, wrong = Names(classes), np.flatnonzero(self.labels != self.predictions)
        chosen = wrong[np.argsort(-self.probabilities[wrong], kind="stable")][:most].tolist()
        return len(wrong), [(int(self.indices[row]), self._caption(row, names)) for row in chosen]

    def right(self, classes: Sequence[str], most: int) -> list[tuple[int, list[str]]]:
        """Return (image index, caption) of some images that are classified right."""
        names, rows = Names(classes), evenly(np.flatnonzero(self.labels == self.predictions), most)
        captions = ([f"{names[self.labels[row]]} ({self.probabilities[row]:.1%})"] for row in rows)
        return [*zip(self.indices[rows].tolist(), captions, strict=True)]

    def scores_of_images(self, metric: str, process: Process) -> np.ndarray | None:
        are_right = (self.labels == self.predictions) & np.isfinite(self.probabilities)
        if metric == "top1":
            return 100 * are_right
        if metric == "loss":
            with np.errstate(divide="ignore"):
                return -np.log(self.label_probabilities)
        if metric not in ("macro_recall", "macro_f1"):
            return None
        actual, predicted, right = self.counts.astype(np.float64)
        factor = 100 * len(self.labels) / max((actual > 0).sum(), 1)
        if metric == "macro_recall":
            return factor * are_right / actual[self.labels]
        # How much F1 changes with the weight of the image.
        total = np.where(actual > 0, actual + predicted, math.inf)  # classes without images do not count
        f1 = 2 * right / total
        change = 2 * are_right / total[self.labels] - (f1 / total)[self.labels] - (f1 / total)[self.predictions]
        return factor * (f1.sum() / len(self.labels) + change)

    def _caption(self, row: int, names: Names) -> list[str]:
        label, prediction = names[self.labels[row]], names[self.predictions[row]]
        certain, of_label = self.probabilities[row], self.label_probabilities[row]
        return [f"label: {label} ({of_label:.1%})", f"model: {prediction} ({certain:.1%})"]


class PerImage:
    """The results of each image of this process, in the order of its share."""

    def __init__(self):
        self._rows: list[Tensor] = []  # float32 [B, 4]; float32 is exact for class numbers up to 16 million
        self.scores: AllScores | None = None  # None if there are too many
        self.features: list[tuple] = []  # of some of the images, for each batch; only FeatureTally keeps them
        # Set at the end of the evaluation: the indices of these images, and the counts of all processes.
        self.indices, self.counts = np.zeros(0, np.int64), np.zeros((3, 0), np.int64)
        self.groups: np.ndarray | None = None  # the group of each image of the set, see engine/evaluation/groups.py

    def keep_scores(self, count: int) -> None:
        """Keep the scores of all classes from now on. `count`: the number of scores of all processes."""
        self.scores = AllScores() if count <= MOST_SCORES else None

    def add(self, logits: Tensor, targets: Tensor, predictions: Tensor) -> None:
        """Add a batch: logits [B, classes], targets [B] and predictions [B]."""
        numbers = torch.stack((targets, predictions), 1)
        self._rows.append(torch.cat((numbers.float(), logits.softmax(1).gather(1, numbers).float()), 1))

    def scaled(self, temperature: Tensor) -> "PerImage":
        """Return the results with the logits divided by the temperature, as halfstep predict divides them."""
        divided, (logits, targets) = type(self)(), map(torch.from_numpy, self.scores.on_host())
        divided.indices, divided.counts = self.indices, self.counts
        # The scored predictions, not a new argmax: logits in half precision can be equal, and devices break ties
        # differently.
        divided.add(logits / temperature, targets, torch.from_numpy(self._columns()[2]))
        return divided

    def interval(self, process: Process) -> dict[str, Any]:
        """Return the fields of the scores about groups of images. Collective."""
        from engine.evaluation.groups import accuracy_interval

        results = self.gather(process)
        are_right = (results.labels == results.predictions) & np.isfinite(results.probabilities)
        number, low, high = accuracy_interval(are_right, self.groups[results.indices])
        return {"num_groups": number, "top1_low": low, "top1_high": high}

    def gather(self, process: Process) -> "ImageResults":
        """Return the results of all processes in each process. This is a collective that waits for the device."""
        indices, *columns = joined(process, *self._columns())
        return ImageResults(indices, self.counts, self, None, *columns)

    def _columns(self) -> tuple[np.ndarray, ...]:
        """Return the columns of ImageResults for the images of this process."""
        rows = torch.cat(self._rows).cpu().numpy() if self._rows else np.zeros((0, 4), np.float32)
        ensure(len(rows) == len(self.indices), f"there are {len(rows)} results for {len(self.indices)} images")
        labels, predictions = rows[:, :2].T.astype(np.int64)
        return self.indices, labels, predictions, rows[:, 3], rows[:, 2]


# --- the scores ---


class ClassTally:
    """Adds up the scores of images that each have one class.

    It keeps sums over the images, and the scores of all classes for each image, up to MOST_SCORES.
    """

    results = PerImage

    def __init__(self, device: torch.device, dtype: torch.dtype, num_images: int):
        """`num_images` is the number of images that all processes together will add."""
        self.sums = torch.zeros(5, dtype=dtype, device=device)  # loss, top-1, top-5, images, excluded
        # Numbers of images, predictions and correct predictions of each class: [3, classes] from the first batch on.
        self.counts = torch.zeros(0, dtype=dtype, device=device)
        self.num_images, self.per_image = num_images, self.results()

    def add(self, logits: Tensor, targets: Tensor, num_excluded: int) -> None:
        """Add a batch: logits [at least B, classes], targets of B images as in Batch."""
        logits = widen(logits[: len(targets)])
        if not len(self.counts):
            self.counts = self.sums.new_zeros(3, logits.shape[1])
            self.per_image.keep_scores(self.num_images * logits.shape[1])
        if self.per_image.scores:
            self.per_image.scores.add(logits, targets)
        best = logits.topk(min(5, logits.shape[1])).indices
        losses, are_right = self.count(logits, targets, best)
        self.sums[0] += losses.to(self.sums).sum()
        self.sums[1] += are_right[:, 0].sum()
        self.sums[2] += are_right.any(1).sum()
        self.sums[3] += len(targets)
        self.sums[4] += num_excluded

    def count(self, logits: Tensor, targets: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Count the images. Return the losses [B], and whether each of the `best` classes is correct."""
        self.per_image.add(logits, targets, best[:, 0])
        are_right, ones = best.eq(targets[:, None]), torch.ones_like(targets, dtype=self.counts.dtype)
        are_right &= are_finite(logits)[:, None]
        counted = ((targets, ones), (best[:, 0], ones), (targets, are_right[:, 0].to(ones)))
        for row, (classes, values) in zip(self.counts, counted, strict=True):
            row.index_add_(0, classes, values)  # not bincount, because it would make the host wait
        return functional.cross_entropy(logits, targets, reduction="none"), are_right

    def result(self, process: Process) -> Scores:
        """Return the scores over the images of all processes. This waits for the device."""
        values = process.sum(torch.cat((self.sums, self.counts.flatten()))).tolist()
        loss, top1, top5, count, excluded = values[:5]
        total, counts = max(count, 1), np.reshape(values[5:], (3, -1))
        self.per_image.counts = counts.astype(np.int64)
        means = loss / total, 100 * top1 / total, 100 * top5 / total
        of_groups = {} if self.per_image.groups is None or not count else self.per_image.interval(process)
        return Scores(*means, int(count), int(excluded), **self.more_scores(counts, process), **of_groups)

    def more_scores(self, counts: np.ndarray, process: Process) -> dict[str, float]:
        """Return further fields of the scores. `counts`: `self.counts` over all processes. Collective."""
        return macro_scores(*counts)


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
