"""Finds the teacher that the settings name, and checks that its classes fit the data."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from configs.schema import Config, Model
from configs.values import unflatten
from extras.distillation.teacher import Teacher
from models import build_model
from models.parts import classifier_names
from models.weights.files import find_file, read_record, read_state_dict
from models.weights.load import load_pretrained
from utils.errors import ConfigError, did_you_mean
from utils.text import counted, first_of
from utils.torch_internals import import_timm

KEY, WEIGHTS_KEY = "TRAIN.TEACHER_MODEL", "TRAIN.TEACHER_PRETRAINED"
REMEDY = f"train the teacher on this data first, and name its checkpoint: -opts {KEY}=output/train-.../best.pth"


class TeacherSource(NamedTuple):
    """The model, weights and classes of a teacher that has not been built yet."""

    config: Config  # settings for the teacher's model and for the normalization of its images
    weights: str  # a file, or the name of a timm model
    classes: list[str] | None  # names of its outputs, if known
    num_classes: int | None
    side: int | None  # the only image size that the model takes; None: any size


def load_teacher(config: Config, classes: Sequence[str], num_classes: int) -> tuple[Teacher, list[str]]:
    """Load the teacher on the CPU. Return it with lines for the log. `classes`: names of the data's classes."""
    found = find_teacher(config)
    outputs = _outputs(found, list(classes), num_classes)
    number = len(found.classes) if outputs else num_classes
    with torch.random.fork_rng(devices=[]):
        model = _build(found, number)
        if found.num_classes is None:
            _check_number(model, found.weights, num_classes)
        key = WEIGHTS_KEY if config.TRAIN.TEACHER_PRETRAINED else KEY
        lines = load_pretrained(model, found.weights, key, needs_head=True)
    return Teacher(model, config.DATA, found.config.DATA, outputs, _side_of(found, model)), lines


def random_teacher(config: Config, num_classes: int) -> Teacher:
    """Return the teacher with random weights, for memory trials."""
    found = find_teacher(config)
    model = _build(found, num_classes)
    return Teacher(model, config.DATA, found.config.DATA, side=_side_of(found, model))


def _build(found: TeacherSource, num_classes: int) -> torch.nn.Module:
    try:
        return build_model(found.config, num_classes)
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {str(error).removeprefix('MODEL.NAME: ')}") from None


def _side_of(found: TeacherSource, model: torch.nn.Module) -> int | None:
    """Return the side of the square images that the teacher gets; None: images as the student gets them."""
    if found.side and found.config.DATA.TOKENS:  # the largest square within the teacher's number of patches
        return math.isqrt(found.config.DATA.TOKENS) * model.get_patch_size()[0]
    return found.side


def find_teacher(config: Config) -> TeacherSource:
    """Find the teacher: a timm model by its name, or a checkpoint, which also holds the settings of its run."""
    timm = import_timm()
    name, weights = config.TRAIN.TEACHER_MODEL, config.TRAIN.TEACHER_PRETRAINED
    path = find_file(name)
    if path:
        return _of_run(config, str(path), read_record(path))
    if not timm.is_model(name):
        raise ConfigError(
            f"{KEY}: there is no file {name}, and timm has no model of this name"
            f"{did_you_mean(name, timm.list_models())}"
        )
    cfg = timm.get_pretrained_cfg(weights if weights and timm.is_model(weights) else name)
    file = find_file(weights) if weights else None
    has_means = cfg is not None and len(cfg.mean) == config.DATA.IMAGE_CHANNELS
    images = {"IMAGENET_MEAN": tuple(cfg.mean), "IMAGENET_STD": tuple(cfg.std)} if has_means else {}
    # With DATA.TOKENS, the teacher gets patches, and the size of its weights' images only sets its position embedding.
    has_side = cfg is not None and (cfg.fixed_input_size or config.DATA.TOKENS)
    side = cfg.input_size[-1] if has_side else None
    data = replace(config.DATA, **images, **({"IMAGE_SIZE": side} if side else {}))
    # The teacher needs no schedule of sizes: its model takes images of one size, or of any size.
    train = replace(config.TRAIN, SIZE_SCHEDULE=())
    built = replace(config, DATA=data, MODEL=Model(TYPE="timm", NAME=name), TRAIN=train)
    names = read_record(file).get("class_names") if file else None
    number = len(names) if names else None if file or cfg is None else cfg.num_classes
    return TeacherSource(built, weights or name, names, number, None if config.DATA.TOKENS else side)


def _of_run(config: Config, path: str, record: dict) -> TeacherSource:
    settings, names = record.get("config", {}), record.get("class_names")
    if "MODEL.TYPE" not in settings or not names:
        raise ConfigError(
            f"{KEY}: {path} does not say which model its weights are for; set {KEY} to a timm model, "
            f"and {WEIGHTS_KEY} to this file"
        )
    if config.TRAIN.TEACHER_PRETRAINED:
        raise ConfigError(f"{WEIGHTS_KEY} is set, but {KEY}, {path}, contains weights; remove one of these settings")
    then = unflatten(settings)
    if then.DATA.IMAGE_CHANNELS != config.DATA.IMAGE_CHANNELS:
        raise ConfigError(
            f"{KEY}: {path} takes images of {counted(then.DATA.IMAGE_CHANNELS, 'channel')}; set DATA.IMAGE_CHANNELS to "
            f"{then.DATA.IMAGE_CHANNELS}, or name another teacher"
        )
    # The teacher gets the student's images. With DATA.TOKENS, a plain ViT is built for sequences of patches too.
    side = None if config.DATA.TOKENS else then.DATA.IMAGE_SIZE
    data = replace(then.DATA, TOKENS=config.DATA.TOKENS or then.DATA.TOKENS)
    then = replace(then, DATA=data, MODEL=replace(then.MODEL, FREEZE=()))
    return TeacherSource(then, path, list(names), then.MODEL.NUM_CLASSES or len(names), side)


def _outputs(found: TeacherSource, classes: list[str], num_classes: int) -> list[int]:
    """Return the index of the teacher's output for each class of the data.

    An empty list means that the outputs already have the order of the classes.
    """
    if found.classes and len(found.classes) == found.num_classes and num_classes == len(classes):
        unknown = [name for name in classes if name not in found.classes]
        if unknown:
            raise ConfigError(f"{KEY}: {found.weights} does not know these classes: {first_of(unknown)}; {REMEDY}")
        return [] if classes == found.classes else [found.classes.index(name) for name in classes]
    if found.num_classes not in (None, num_classes):
        raise ConfigError(
            f"{KEY}: {found.weights} has {found.num_classes} classes, but the data has {num_classes}; {REMEDY}"
        )
    return []


def _check_number(model: torch.nn.Module, file: str, num_classes: int) -> None:
    """Raise ConfigError if the classifier in the file and the data differ in their number of classes."""
    state = read_state_dict(file)
    for name in classifier_names(model):
        rows = len(state.get(f"{name}.weight", range(num_classes)))
        if rows != num_classes:
            raise ConfigError(f"{WEIGHTS_KEY}: {file} has {rows} classes, but the data has {num_classes}; {REMEDY}")
