"""The task of runs whose images can have any number of classes: a yes or no for each class."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from datasets import ImageSet
from engine.confidence.temperature import Likelihood, Measured, blocks
from engine.evaluation.all_scores import AllScores, precisions_at
from engine.evaluation.tally import joined
from engine.precision import are_finite
from engine.tasks.class_tables import ClassResults, Names, evenly, format_share
from engine.tasks.classes import ClassTally, ClassTask, PerImage, macro_scores
from utils.distributed import Process
from utils.errors import ensure

SEPARATOR = "|"  # separates several labels of an image
# The limit on predicted classes per image. An untrained model predicts half of all classes.
MOST_PREDICTED = 100
MOST_COMPARED = 2**24  # with more scores (images x classes), two evaluations are not compared image by image


class OfLabels(Likelihood):
    """The likelihood of labels that are each present or not: the sigmoid. Each class has its own temperature."""

    has_curve = False

    def num_temperatures(self, num_classes: int) -> int:
        return num_classes

    def slopes(self, logits: np.ndarray, targets: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and second derivatives of each class's mean loss by its inverse temperature."""
        first = second = np.zeros(len(inverse))
        for start, scores in blocks(logits):
            chances = sigmoid(scores * inverse)
            first = first + (scores * (chances - targets[start : start + len(scores)])).sum(0)
            second = second + (scores**2 * chances * (1 - chances)).sum(0)
        return first / len(logits), second / len(logits)

    def measure(self, logits: np.ndarray, targets: np.ndarray, temperature: np.ndarray) -> Measured:
        """Compare the probability of each pair of image and class with the labels."""
        parts = []
        for start, scores in blocks(logits):
            scaled, labels = scores / temperature, targets[start : start + len(scores)]
            losses = np.logaddexp(0, scaled) - scaled * labels
            parts.append((sigmoid(scaled).ravel(), labels.ravel(), losses.ravel()))
        return Measured(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def sigmoid(scores: np.ndarray) -> np.ndarray:
    decayed = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1, decayed) / (1 + decayed)


class LabelTask(ClassTask):
    """An image can have any number of classes. Those with a probability above one half are predicted."""

    likelihood = OfLabels()
    why_no_shards = (
        "shards have one label per image, so LABEL_SEPARATOR and columns of 0 and 1 are not supported; give data with "
        "one label per image"
    )

    @property
    def tally(self) -> type["LabelTally"]:
        return LabelTally

    def is_class(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return targets.gather(1, predictions[:, None])[:, 0] > 0

    def start_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one regression for each class."""
        return functional.binary_cross_entropy_with_logits(logits, targets.double(), reduction="none").sum(1).mean()

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def answers(self, probabilities: Tensor, most: int | None) -> list[list[tuple[int, float]]]:
        answers = super().answers(probabilities, most or probabilities.shape[1])
        return answers if most else [[each for each in row if each[1] > 0.5] for row in answers]

    def answer(self, probabilities: np.ndarray) -> np.ndarray:
        return probabilities > 0.5

    def truth(self, images: ImageSet, index: int) -> np.ndarray:
        return np.isin(np.arange(len(images.classes)), images.meaning.classes_of(int(images.targets[index])))

    def cost(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        return np.abs(2 * before - 1) * (self.answer(before) != self.answer(after))


# --- the results of images ---


@dataclass(frozen=True)
class LabelResults(ClassResults):
    """The results of images with any number of labels: a row for each label and each predicted class."""

    images: np.ndarray  # the index of the image of each row; rows of an image are adjacent, the most probable first
    classes: np.ndarray
    probabilities: np.ndarray
    are_labels: np.ndarray  # bool
    are_predicted: np.ndarray

    def rows(self, image_set: ImageSet, names: Names) -> Iterator[tuple[str, ...]]:
        """Yield rows with all labels in a cell, all predicted classes in another, and their probabilities in two."""
        starts, ends = (np.searchsorted(self.images, self.indices, side=side) for side in ("left", "right"))
        for index, start, end in zip(self.indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
            cells = {}
            for name, chosen in (("label", self.are_labels), ("prediction", self.are_predicted)):
                rows = start + np.flatnonzero(chosen[start:end])
                cells[name] = SEPARATOR.join(names[number] for number in self.classes[rows].tolist())
                cells[f"{name}s"] = SEPARATOR.join(map(format_share, self.probabilities[rows].tolist()))
            yield (
                image_set.table_name(index),
                cells["label"],
                cells["prediction"],
                cells["predictions"],
                cells["labels"],
            )

    def errors(self, classes: Sequence[str], most: int) -> tuple[int, list[tuple[int, list[str]]]]:
        """Return the number of mistakes, and (image index, caption) of the most confident ones.

        Each missed label and each wrong prediction is a mistake.
        """
        names, wrong = Names(classes), np.flatnonzero(self.are_labels != self.are_predicted)
        certainty = np.where(self.are_predicted, self.probabilities, 1 - self.probabilities)
        chosen = wrong[np.argsort(-certainty[wrong], kind="stable")][:most].tolist()
        return len(wrong), [(int(self.images[row]), self._caption(row, names)) for row in chosen]

    def right(self, classes: Sequence[str], most: int) -> list[tuple[int, list[str]]]:
        """Return (image index, caption) of some images without mistakes."""
        names, wrong = Names(classes), self.images[self.are_labels != self.are_predicted]
        captions = []
        for index in evenly(np.setdiff1d(self.indices, wrong), most):
            labels = (names[number] for number in self.classes[(self.images == index) & self.are_labels].tolist())
            captions.append((index, [", ".join(labels) or "no label"]))
        return captions

    def scores_of_images(self, metric: str, process: Process) -> np.ndarray | None:
        if len(self.indices) * self.counts.shape[1] > MOST_COMPARED:
            return None
        _, scores, targets = joined(process, self.local.indices, *self.local.scores.on_host())
        if metric == "loss":
            return (np.logaddexp(0, scores) - scores * targets).mean(1)
        if metric == "map":
            return precisions_of_images(scores, targets)
        if metric in ("macro_recall", "macro_f1", "micro_f1"):
            return influences(targets, scores > 0, metric)
        return None

    def _caption(self, row: int, names: Names) -> list[str]:
        how = "not a label" if self.are_predicted[row] else "a label"
        return [f"{how}: {names[self.classes[row]]}", f"model: {self.probabilities[row]:.1%}"]


def precisions_of_images(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return float64 [N], whose mean is mAP in percent: weighted precisions at the score of each label of an image."""
    sums, num_labels = np.zeros(len(scores)), targets.sum(0)
    for number in np.flatnonzero(num_labels).tolist():
        has_class = targets[:, number]
        sums[has_class] += precisions_at(scores[:, number], has_class) / num_labels[number]
    return 100 * len(scores) * sums / max(np.count_nonzero(num_labels), 1)


def influences(targets: np.ndarray, predicted: np.ndarray, metric: str) -> np.ndarray:
    """Return float64 [N], whose mean is macro recall, macro F1 or micro F1 in percent.

    `targets` and `predicted`: [N, classes].

    For F1, it is how much F1 changes with the weight of the image.
    """
    right = targets & predicted
    if metric == "micro_f1":
        targets, predicted, right = (each.sum(1, keepdims=True) for each in (targets, predicted, right))
    present = targets.any(0)
    targets, predicted, right = (each[:, present].astype(np.float64) for each in (targets, predicted, right))
    if metric == "macro_recall":
        parts = right / targets.sum(0)
    else:
        total = targets.sum(0) + predicted.sum(0)
        f1 = 2 * right.sum(0) / total
        parts = f1 / len(right) + (2 * right - f1 * (targets + predicted)) / total
    return 100 * len(right) * parts.sum(1) / max(present.sum(), 1)


class LabelScores(AllScores):
    """The score of each class for each image. The labels are bool [B, classes]."""

    def add(self, scores: Tensor, targets: Tensor) -> None:
        super().add(scores, targets.bool())

    def has_class(self, targets: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return targets[:, numbers]

    def totals(self, scores: np.ndarray) -> float:
        return 0.0


class LabelsPerImage(PerImage):
    """The results of each image of this process, from the scores of all classes."""

    def keep_scores(self, count: int) -> None:
        self.scores = LabelScores()

    def add(self, logits: Tensor, targets: Tensor, predictions: Tensor) -> None:
        """Add a batch like PerImage."""
        self.keep_scores(len(logits))
        self.scores.add(logits, targets)

    def interval(self, process: Process) -> dict[str, float]:
        """Return nothing, because the scores of several labels have no interval."""
        return {}

    def gather(self, process: Process) -> LabelResults:
        parts = process.join([self._columns()])
        indices, images, *columns = (np.concatenate(each) for each in zip(*parts, strict=True))
        order, rows = np.argsort(indices, kind="stable"), np.lexsort((-columns[1], images))
        return LabelResults(indices[order], self.counts, self, None, images[rows], *(each[rows] for each in columns))

    def _columns(self) -> tuple[np.ndarray, ...]:
        """Return the columns of LabelResults for the images of this process."""
        scores, targets = self.scores.on_host()
        ensure(len(scores) == len(self.indices), f"there are {len(scores)} results for {len(self.indices)} images")
        kept = scores > 0
        if scores.shape[1] > MOST_PREDICTED:
            kept &= scores >= np.partition(scores, -MOST_PREDICTED, axis=1)[:, -MOST_PREDICTED, None]
        images, classes = np.nonzero(kept | targets)
        chosen = scores[images, classes]
        with np.errstate(over="ignore"):
            probabilities = 1 / (1 + np.exp(-chosen))
        return self.indices, self.indices[images], classes, probabilities, targets[images, classes], chosen > 0


# --- the scores ---


class LabelTally(ClassTally):
    """Adds up the scores of images with any number of labels."""

    results = LabelsPerImage

    def count(self, logits: Tensor, targets: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Count images with several labels, like ClassTally. Classes with a probability above 0.5 are predicted."""
        actual, predicted = targets.bool(), logits > 0
        self.counts += torch.stack([each.sum(0) for each in (actual, predicted, actual & predicted)])
        losses = functional.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1)
        return losses, (targets.gather(1, best) > 0) & are_finite(logits)[:, None]

    def more_scores(self, counts: np.ndarray, process: Process) -> dict[str, float]:
        average = self.per_image.scores.mean_average_precision(process)
        return macro_scores(*counts) | {"micro_f1": micro_f1(*counts), "map": average}


def micro_f1(actual: np.ndarray, predicted: np.ndarray, right: np.ndarray) -> float:
    """Return F1 over all pairs of image and class, in percent."""
    return 200 * float(right.sum() / max((actual + predicted).sum(), 1))
