"""Adds TRAIN.OBJECTIVE features to a training step: a student with maps, the teacher's features, and their loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import Config
from datasets import BadImages, Batch, EvalData, ImageSet, Preparation, build_eval_data
from engine.evaluation.tally import widen
from engine.precision.policy import Precision
from engine.train.loss import ExtendedTargets, Loss
from extras.distillation.step import TeacherPreparation
from extras.distillation.teacher import Teacher
from extras.unlabelled.labelled import read_labelled
from extras.unlabelled.student import PARTS, make_student
from extras.unlabelled.teacher import compare_features, load_feature_teacher
from utils.distributed import Process
from utils.log import Log
from utils.text import counted


def make_feature_training(config: Config, process: Process, log: Log, is_trial: bool = False) -> "FeatureTraining":
    """Return the step wrapper of TRAIN.OBJECTIVE features. Each process loads the whole teacher. Collective.

    `is_trial`: use a teacher with random weights, and no labelled images.
    """
    parts = PARTS[config.TRAIN.FEATURES]
    teacher, lines = process.after_first(lambda: load_feature_teacher(config, parts, is_trial))
    if is_trial:
        return FeatureTraining(config, log, teacher, None)
    log.say(*lines, f"teacher: {config.TRAIN.TEACHER_MODEL}, {teacher.describe()}")
    if not config.DATA.LABELLED_PATH:
        return FeatureTraining(config, log, teacher, None)
    labelled = process.after_first(lambda: read_labelled(config, log.say))
    num_images, num_classes = counted(len(labelled), "image"), counted(len(labelled.classes), "class")
    log.say(f"labelled images for the k-NN accuracy: {num_images} of {num_classes}")
    bad_images = BadImages(labelled, config.DATA.MAX_BAD_FRACTION, log.warn)
    data = build_eval_data(config, labelled, process)
    return FeatureTraining(config, log, teacher, Labelled(labelled, data, bad_images))


@dataclass(frozen=True)
class Labelled:
    """The images of DATA.LABELLED_PATH, their loader, and the unreadable images so far."""

    images: ImageSet
    data: EvalData
    bad_images: BadImages


class FeatureTraining:
    """A StepWrapper that makes a model learn the features of a teacher."""

    def __init__(self, config: Config, log: Log, teacher: Teacher, labelled: Labelled | None):
        self._config, self._log, self._teacher, self._labelled = config, log, teacher, labelled

    def change_model(self, model: nn.Module) -> None:
        parts, config = PARTS[self._config.TRAIN.FEATURES], self._config
        own, theirs = compare_features(config, model, self._teacher, parts)
        self._log.say(*make_student(model, parts, own, theirs, config.DATA, config.SEED))

    def wrap(self, prepare: Preparation, loss: Loss, precision: Precision) -> tuple[Preparation, Loss]:
        with_features = FeaturePreparation(prepare, self._teacher, precision, self._config)
        with_features.labelled = self._labelled
        return with_features, FeatureLoss(self._config.TRAIN.FEATURE_LOSS)


@dataclass(frozen=True)
class FeatureTargets(ExtendedTargets):
    """The teacher's features of the images: [B, D] for the whole images, [B, N, D] for their patches."""

    features: tuple[Tensor, ...]


class FeaturePreparation(TeacherPreparation):
    """A preparation whose targets are the teacher's features of the augmented images. Labels are ignored."""

    labelled: Labelled | None = None  # the images for the k-NN accuracy

    def __call__(self, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, FeatureTargets]:
        images, _ = self.prepare(batch, dtype)
        return images, self.targets_of(images)

    @torch.no_grad()
    def targets_of(self, images: Tensor) -> FeatureTargets:
        with self.precision.autocast():
            return FeatureTargets(None, self.teacher(images))


class FeatureLoss:
    """The sum of the losses of all chosen features, each a mean over the images, computed in float32 or better."""

    def __init__(self, kind: str):
        self._kind = kind  # TRAIN.FEATURE_LOSS

    def __call__(self, outputs: tuple[Tensor, ...], targets: FeatureTargets) -> Tensor:
        return self.of_images(outputs, targets).mean()

    def of_images(self, outputs: tuple[Tensor, ...], targets: FeatureTargets) -> Tensor:
        """Return the loss of each image: [B]."""
        return sum(self._of_one(widen(ours), widen(theirs)) for ours, theirs in pairs(outputs, targets))

    def _of_one(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """Return [B] for features [B, D] or [B, N, D]."""
        if self._kind == "cosine":
            return 1 - mean_cosine(ours, theirs)
        return functional.smooth_l1_loss(ours, theirs, reduction="none").flatten(1).mean(1)


def pairs(outputs: tuple[Tensor, ...], targets: FeatureTargets) -> list[tuple[Tensor, Tensor]]:
    return list(zip(outputs, targets.features, strict=True))


def mean_cosine(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the cosine of features [B, D], or the mean cosine of patches [B, N, D]: [B]."""
    return functional.cosine_similarity(ours, theirs, dim=-1)[:, None].flatten(1).mean(1)
