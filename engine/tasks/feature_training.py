"""Adds TRAIN.OBJECTIVE features to a training step: a student with maps, the teacher's features, and their loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import Config, Data
from datasets import BadImages, Batch, EvalData, ImageSet, Preparation, build_eval_data, open_data
from datasets.sources.folder import training_folder
from engine.precision import Precision, widen
from engine.train.distillation import KEY, Teacher, TeacherPreparation, find_teacher
from engine.train.loss import ExtendedTargets, Loss
from models.features import Widths, features_of, widths_of
from models.transforms.base import ModelTransform, wrap
from models.weights.state import FEATURE_MAPS
from utils.distributed import Process
from utils.errors import ConfigError, DataError
from utils.log import Log
from utils.text import counted, first_of
from utils.torch_internals import import_timm


def make_feature_training(config: Config, process: Process, log: Log, is_trial: bool = False) -> "FeatureTraining":
    """Return the step wrapper of TRAIN.OBJECTIVE features. Each process loads the whole teacher. Collective.

    `is_trial`: use a teacher with random weights, and no labelled images.
    """
    parts = PARTS[config.TRAIN.FEATURES]
    teacher, lines = process.after_first(lambda: load_feature_teacher(config, parts, is_trial))
    labelled = None
    if not is_trial:
        log.say(*lines, f"teacher: {config.TRAIN.TEACHER_MODEL}, {teacher.describe()}")
        labelled = load_labelled(config, process, log) if config.DATA.LABELLED_PATH else None
    return FeatureTraining(config, log, teacher, labelled)


class Labelled(NamedTuple):
    """The loader of the images of DATA.LABELLED_PATH, and the unreadable images so far."""

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
    def targets_of(self, images: Tensor, count: int | None = None) -> FeatureTargets:
        """Return the features of the images, or of the first `count` if the others are padding."""
        with self.precision.autocast():
            return FeatureTargets(None, tuple(each[:count] for each in self.teacher(images)))


class FeatureLoss:
    """The sum of the losses of all chosen features, each a mean over the images, computed in float32 or better."""

    def __init__(self, kind: str):
        self._kind = kind  # TRAIN.FEATURE_LOSS

    def __call__(self, outputs: tuple[Tensor, ...], targets: FeatureTargets) -> Tensor:
        return self.of_images(outputs, targets).mean()

    def of_images(self, outputs: tuple[Tensor, ...], targets: FeatureTargets) -> Tensor:
        """Return the loss of each image: [B]. The features are [B, D] or [B, N, D]."""
        pairs = [(widen(ours), widen(theirs)) for ours, theirs in zip(outputs, targets.features, strict=True)]
        if self._kind == "cosine":
            return sum(1 - mean_cosine(*pair) for pair in pairs)
        return sum(functional.smooth_l1_loss(*pair, reduction="none").flatten(1).mean(1) for pair in pairs)


def mean_cosine(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the cosine of features [B, D], or the mean cosine of patches [B, N, D]: [B]."""
    return functional.cosine_similarity(ours, theirs, dim=-1)[:, None].flatten(1).mean(1)


# --- the student ---


MAPS = FEATURE_MAPS.rstrip(".")
PARTS = {"both": ("pooled", "patches"), "pooled": ("pooled",), "patches": ("patches",)}  # by TRAIN.FEATURES


@dataclass(frozen=True)
class FeatureOutput(ModelTransform):
    """Makes a model return features instead of logits: a tuple with each of the `parts`, mapped if the model has maps.

    In evaluation, a model with maps also returns its own pooled features [B, D] as the last element.
    """

    parts: tuple[str, ...]

    def apply(self, model: nn.Module) -> list[str]:
        wrap(model, self)
        return []

    def subclass(self, cls: type) -> type:
        parts = self.parts

        class FeatureModel(cls):
            def forward(self, images: Tensor) -> tuple[Tensor, ...]:
                found = features_of(self, images)
                chosen = tuple(getattr(found, part) for part in parts)
                if not hasattr(self, MAPS):
                    return chosen
                maps = getattr(self, MAPS)
                mapped = tuple(maps[part](each) for part, each in zip(parts, chosen, strict=True))
                return mapped if self.training else (*mapped, found.pooled)

        return FeatureModel


def make_student(
    model: nn.Module, parts: Sequence[str], own: Widths, teacher: Widths, data: Data, seed: int
) -> list[str]:
    """Remove the classifier, add the maps, and make the model return features. Return lines for the log.

    `own`, `teacher`: the sizes of both models' features. The weights of the maps depend only on `seed`, so they are
    equal in all processes.
    """
    parameter = next(model.parameters())
    model.reset_classifier(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maps = nn.ModuleDict({part: nn.Linear(getattr(own, part), getattr(teacher, part)) for part in parts})
    model.add_module(MAPS, maps.to(parameter.device, parameter.dtype))
    FeatureOutput(tuple(parts)).apply(model)
    return _freeze_unused(model, parameter.new_zeros(1, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE))


def _freeze_unused(model: nn.Module, images: Tensor) -> list[str]:
    """Freeze the weights that no chosen feature depends on, because DDP would wait for their gradients."""
    was_training = model.training
    with torch.enable_grad():
        *mapped, _ = model.eval()(images)
        sum(each.sum() for each in mapped).backward()
    model.train(was_training)
    unused = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in unused)
        parameter.grad = None
    return [f"not trained, because no feature depends on them: {first_of(unused)}"] if unused else []


# --- the teacher ---


def load_feature_teacher(config: Config, parts: Sequence[str], is_trial: bool = False) -> tuple[Teacher, list[str]]:
    """Load the teacher on the CPU. Return it with lines for the log. In a trial its weights are random."""
    found = find_teacher(config)
    # The classifier is not used. It gets the size that it has in the weights, if that is known.
    num_classes = found.num_classes or len(found.classes or ()) or 1
    model, loaded = found.build(num_classes, needs_head=False, is_trial=is_trial)
    lines = [line for line in loaded if "starts from random weights" not in line]  # about the classifier
    if not is_trial:
        lines.append(f"licence of the teacher's weights: {licence_of(found.weights)}")
    model.reset_classifier(0)
    FeatureOutput(tuple(parts)).apply(model)
    return Teacher(model, config.DATA, found.config.DATA, side=found.side), lines


def licence_of(weights: str) -> str:
    """Return the licence of the teacher's weights as timm states it, or how to find it."""
    timm = import_timm()
    if not timm.is_model(weights):
        return f"not stated in {weights}; it depends on the images and weights that were used in training"
    stated = getattr(timm.get_pretrained_cfg(weights), "license", None)
    return stated or f"not stated by timm; see the model card of {weights}"


def compare_features(
    config: Config, student: nn.Module, teacher: Teacher, parts: Sequence[str]
) -> tuple[Widths, Widths]:
    """Return the sizes of the features of student and teacher.

    Raise ConfigError if a model has no such features, or if the grids of patches differ at any image size of the run.
    """
    sides = {config.DATA.IMAGE_SIZE: "DATA.IMAGE_SIZE"}
    sides = dict.fromkeys(config.train_sizes.values(), "TRAIN.SIZE_SCHEDULE") | sides
    for side, setting in sides.items():  # the last one is DATA.IMAGE_SIZE
        own = _widths("MODEL.NAME", config.MODEL.NAME, student, config, side, parts)
        theirs = _widths(KEY, config.TRAIN.TEACHER_MODEL, teacher.model, config, teacher.side or side, parts)
        if "patches" in parts and own.grid != theirs.grid:
            raise ConfigError(
                f"{setting}: with images of {side} x {side}, {config.MODEL.NAME} has {own.grid} x {own.grid} patches, but "
                f"the teacher has {theirs.grid} x {theirs.grid}; choose models with the same patch size and image size, or "
                "set TRAIN.FEATURES=pooled"
            )
    return own, theirs


def _widths(key: str, name: str, model: nn.Module, config: Config, side: int, parts: Sequence[str]) -> Widths:
    try:
        found = widths_of(model, config.DATA.IMAGE_CHANNELS, side)
    except ConfigError as error:
        raise ConfigError(f"{key}: {name}: {error}") from None
    if "patches" in parts and found.grid is None:
        raise ConfigError(f"{key}: {name} has no square grid of patches; set TRAIN.FEATURES=pooled or change the model")
    return found


# --- labelled images, to measure the features ---


LABELLED = "DATA.LABELLED_PATH"


def load_labelled(config: Config, process: Process, log: Log) -> Labelled:
    """Return the labelled images, ready for evaluations. Collective."""
    images = process.after_first(lambda: read_labelled(config))
    num_images, num_classes = counted(len(images), "image"), counted(len(images.classes), "class")
    log.say(f"labelled images for the k-NN accuracy: {num_images} of {num_classes}")
    bad_images = BadImages(images, config.DATA.MAX_BAD_FRACTION, log.warn)
    return Labelled(build_eval_data(config, images, process), bad_images)


def read_labelled(config: Config) -> ImageSet:
    """Return the images of DATA.LABELLED_PATH: from its class folders, or from train/ if it has train/ and val/."""
    path = config.DATA.LABELLED_PATH
    if not Path(path).expanduser().is_dir():
        raise DataError(f"{LABELLED}: {path} is not a folder; name a folder with a folder of images for each class")
    try:
        folder = str(training_folder(Path(path).expanduser()))
        config = config.changed("DATA", DATASET="imagefolder", DATA_PATH=folder, CLASSES=None)
        images = open_data(config, "validation").val  # all of them, because there is no other part
    except DataError as error:
        raise DataError(f"{LABELLED}: {str(error).removeprefix('DATA.DATA_PATH: ')}") from None
    counts = images.count_classes()
    if (counts > 0).sum() < 2 or counts.max() < 2:
        raise DataError(
            f"{LABELLED}: {path} must have images of at least 2 classes, and at least 2 images of one class, because each "
            "image is compared with the others; add images"
        )
    return images
