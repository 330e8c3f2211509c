"""The task of runs without labels: the features of a teacher. Held-out images measure the similarity to the teacher.

The k-NN accuracy on labelled images, if there are any, shows what the features are worth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from configs.tables import METRICS
from datasets import BadImages, EvalData, ImageSet, build_preparation
from engine.evaluation.evaluate import Evaluation, Inference, evaluate
from engine.evaluation.other_scores import NO_ACCURACY, OtherScores
from engine.evaluation.tally import Scoring, joined
from engine.precision import widen
from engine.tasks.feature_training import (
    FeatureLoss,
    FeaturePreparation,
    FeatureTargets,
    Labelled,
    make_feature_training,
    mean_cosine,
)
from engine.tasks.task import OfWeights, Task
from engine.train.loss import StepWrapper, build_loss
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.errors import ConfigError
from utils.log import Log

NEIGHBOURS = 5  # the nearest images that vote for the class of an image
TEMPERATURE = 0.07  # of the votes' weights, exp(cosine / TEMPERATURE), as in DINO (arXiv:2104.14294)
ROWS_AT_ONCE = 1024  # images whose similarities to all others are in memory at once


@dataclass(frozen=True)
class FeatureScores(OtherScores):
    """The scores of a model that learns features."""

    similarity: float = math.nan  # mean cosine between student and teacher, in percent
    knn: float | None = None  # k-NN accuracy, in percent; None without labelled images


class FeatureTask(Task):
    """The model learns the features that a teacher computes. It has no classes."""

    def wrappers(self, process: Process, log: Log, is_trial: bool) -> list[StepWrapper]:
        return [make_feature_training(self.config, process, log, is_trial)]

    def scoring(self, trainer: Trainer) -> Scoring:
        return similarity(trainer.prepare, trainer.loss)

    def score_more(self, found: list[Evaluation], models: Sequence[nn.Module], trainer: Trainer) -> list[Evaluation]:
        return with_knn(found, models, trainer.prepare.labelled, trainer.inference)

    def open_evaluation(
        self, data: EvalData, inference: Inference, bad_images: BadImages, log: Log, is_run: bool
    ) -> OfWeights:
        """Load the teacher. The weights must have the maps to the teacher's features."""
        if not is_run:
            raise ConfigError(
                "-eval: these weights have no feature maps, without which the similarity to the teacher cannot be "
                "measured; name a run's checkpoint with -resume, or fine-tune the weights (TRAIN.OBJECTIVE=classes)"
            )
        (training,) = self.wrappers(inference.process, log, is_trial=False)
        prepare = build_preparation(self.config, inference.normalize, is_compiled=False)
        prepare, loss = training.wrap(prepare, build_loss(self.config), inference.precision)

        def score(models: Sequence[nn.Module]) -> list[Evaluation]:
            found = evaluate(models, data, inference, bad_images, similarity(prepare, loss))
            return with_knn(found, models, prepare.labelled, inference)

        return training.change_model, score

    def describe_scored(self, eval_set: ImageSet) -> str:
        return "the labelled images" if METRICS[self.config.TRAIN.BEST_METRIC].setting else "the held-out images"


def similarity(prepare: FeaturePreparation, loss: FeatureLoss) -> Scoring:
    """Return the comparison with the teacher, which computes each batch once for all models."""
    return Scoring(partial(SimilarityTally, loss), lambda images, labels: prepare.targets_of(images, len(labels)))


def with_knn(
    found: list[Evaluation], models: Sequence[nn.Module], labelled: Labelled | None, inference: Inference
) -> list[Evaluation]:
    """Add the k-NN accuracy on the labelled images, if there are any. Collective."""
    if labelled is None:
        return found
    others = evaluate(models, labelled.data, inference, labelled.bad_images, Scoring(NeighbourTally))
    pairs = zip(found, others, strict=True)
    return [each._replace(scores=replace(each.scores, knn=other.scores.knn)) for each, other in pairs]


class SimilarityTally:
    """Sums the loss and the cosine between the features of student and teacher. It keeps no results of images."""

    def __init__(self, loss: FeatureLoss, device: torch.device, dtype: torch.dtype, num_images: int):
        self._loss, self.per_image = loss, self
        self._sums = torch.zeros(4, dtype=dtype, device=device)  # loss, cosine, images, unreadable images

    def add(self, outputs: tuple[Tensor, ...], targets: FeatureTargets, num_excluded: int) -> None:
        count = len(targets.features[0])
        *mapped, _ = (widen(each[:count]) for each in outputs)
        pairs = zip(mapped, targets.features, strict=True)
        cosines = [mean_cosine(ours, widen(theirs)) for ours, theirs in pairs]
        self._sums[0] += self._loss.of_images(mapped, targets).to(self._sums).sum()
        self._sums[1] += torch.stack(cosines).mean(0).to(self._sums).sum()
        self._sums[2] += count
        self._sums[3] += num_excluded

    def result(self, process: Process) -> FeatureScores:
        loss, cosine, count, excluded = process.sum(self._sums).tolist()
        total = max(count, 1)
        means = {"loss": loss / total, "similarity": 100 * cosine / total}
        return FeatureScores(**means, **NO_ACCURACY, num_images=int(count), num_excluded=int(excluded))

    def gather(self, process: Process) -> None:
        return None


class NeighbourTally:
    """Keeps the student's own pooled features of labelled images for their k-NN accuracy."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_images: int):
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []  # features [B, D] and labels [B]
        self._num_excluded, self.per_image = 0, self
        self.indices = np.zeros(0, np.int64)  # of this process's images, set at the end of the evaluation

    def add(self, outputs: tuple[Tensor, ...], labels: Tensor, num_excluded: int) -> None:
        self._rows.append((widen(outputs[-1][: len(labels)]).cpu().numpy(), labels.cpu().numpy()))
        self._num_excluded += num_excluded

    def result(self, process: Process) -> FeatureScores:
        features, labels = (np.concatenate(column) for column in zip(*self._rows, strict=True))
        indices, features, labels = joined(process, self.indices, features, labels)
        knn = process.first(lambda: knn_accuracy(features, labels))
        counts = {"num_images": len(indices), "num_excluded": sum(process.join([self._num_excluded]))}
        return FeatureScores(math.nan, **NO_ACCURACY, **counts, knn=knn)


def knn_accuracy(features: np.ndarray, targets: np.ndarray) -> float:
    """Return the percentage of images whose class wins the vote of their nearest other images.

    `features` [N, D], `targets` [N]. The NEIGHBOURS images with the largest cosine vote, and nearer images have more
    weight. The result does not depend on the order of the images, unless cosines are equal.
    """
    features = features.astype(np.float64)
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    num_images, num_right = len(features), 0
    k = min(NEIGHBOURS, num_images - 1)
    for start in range(0, num_images, ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, num_images))
        cosines = features[rows] @ features.T
        cosines[rows - start, rows] = -np.inf
        nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
        weights = np.exp(np.take_along_axis(cosines, nearest, 1) / TEMPERATURE)
        votes = np.zeros((len(rows), int(targets.max()) + 1))
        np.add.at(votes, (np.repeat(rows - start, k), targets[nearest].ravel()), weights.ravel())
        num_right += int((votes.argmax(1) == targets[rows]).sum())
    return 100 * num_right / max(num_images, 1)
