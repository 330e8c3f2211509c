"""The teacher of TRAIN.OBJECTIVE features: a trained model that returns features, which must fit the student."""

from collections.abc import Sequence

import torch
from torch import nn

from configs.schema import Config
from extras.distillation.sources import KEY, WEIGHTS_KEY, TeacherSource, find_teacher
from extras.distillation.teacher import Teacher
from extras.unlabelled.student import FeatureOutput
from models import build_model
from models.features import Widths, widths_of
from models.weights.load import load_pretrained
from utils.errors import ConfigError
from utils.torch_internals import import_timm

PATCHES = "TRAIN.FEATURES"


def load_feature_teacher(config: Config, parts: Sequence[str], is_trial: bool = False) -> tuple[Teacher, list[str]]:
    """Load the teacher on the CPU. Return it with lines for the log. In a trial its weights are random."""
    found, lines = find_teacher(config), []
    # The classifier is not used. It gets the size that it has in the weights, if that is known.
    num_classes = found.num_classes or len(found.classes or ()) or 1
    with torch.random.fork_rng(devices=[]):
        model = build_model(found.config, num_classes)
        if not is_trial:
            key = WEIGHTS_KEY if config.TRAIN.TEACHER_PRETRAINED else KEY
            loaded = load_pretrained(model, found.weights, key)
            lines = [line for line in loaded if "starts from random weights" not in line]  # about the classifier
            lines.append(f"licence of the teacher's weights: {licence_of(config, found)}")
    model.reset_classifier(0)
    FeatureOutput(tuple(parts)).apply(model)
    return Teacher(model, config.DATA, found.config.DATA, side=found.side), lines


def licence_of(config: Config, found: TeacherSource) -> str:
    """Return the licence of the teacher's weights as timm states it, or how to find it."""
    timm, name = import_timm(), config.TRAIN.TEACHER_MODEL
    weights = found.weights if timm.is_model(found.weights) else name if timm.is_model(name) else None
    if weights is None:
        return f"not stated in {found.weights}; it depends on the images and weights that were used in training"
    stated = getattr(timm.get_pretrained_cfg(weights), "license", None)
    stated = stated or f"not stated by timm; see the model card of {weights}"
    is_file = weights != found.weights
    return f"not stated in {found.weights}; timm's own weights of {weights}: {stated}" if is_file else stated


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
            raise ConfigError(_describe_grids(config, setting, side, teacher.side, own.grid, theirs.grid))
    return own, theirs


def _widths(key: str, name: str, model: nn.Module, config: Config, side: int, parts: Sequence[str]) -> Widths:
    try:
        found = widths_of(model, config.DATA.IMAGE_CHANNELS, side)
    except ConfigError as error:
        raise ConfigError(f"{key}: {name}: {error}") from None
    if "patches" in parts and found.grid is None:
        raise ConfigError(f"{key}: {name} has no square grid of patches; set {PATCHES}=pooled, or choose another model")
    return found


def _describe_grids(config: Config, setting: str, side: int, fixed: int | None, own: int, theirs: int) -> str:
    """Return the error for grids of patches that differ, with the image size at which they would agree, if any."""
    resized = f", whose images are resized to {fixed} x {fixed}," if fixed and fixed != side else ""
    fitting = side * theirs / own
    remedy = (
        f"set DATA.IMAGE_SIZE={fitting:.0f}, "
        if fixed and fitting == int(fitting) and "SCHEDULE" not in setting
        else ""
    )
    return (
        f"{setting}: with images of {side} x {side}, {config.MODEL.NAME} has {own} x {own} patches, but the teacher"
        f"{resized} has {theirs} x {theirs}; {remedy}choose models with the same patch size, or set {PATCHES}=pooled"
    )
