"""Refuses settings that do not work with TRAIN.OBJECTIVE features, or only with it."""

from collections.abc import Iterator
from typing import Any

from configs.combinations import several_labels_key
from configs.values import SETTINGS, to_text
from utils.errors import ConfigError

OBJECTIVE, METRIC, TEACHER = "TRAIN.OBJECTIVE", "TRAIN.BEST_METRIC", "TRAIN.TEACHER_MODEL"
METRICS = ("similarity", "knn")  # only with OBJECTIVE features
# Settings that need classes. Label smoothing is not among them: recipes set it, and without classes it does nothing.
OF_CLASSES = ("TRAIN.DISTILLATION_TYPE", "TRAIN.LOSS", "TRAIN.CLASS_WEIGHTS", "DATA.SAMPLER")
OF_MIXING = ("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX")


def check_features(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Raise ConfigError if values are incompatible. `values`: {full key: value}; `origins`: where each was set."""
    if values[OBJECTIVE] == "features" and (values[TEACHER] is None or origins[TEACHER] == "default"):
        raise ConfigError(
            f"{TEACHER}: no teacher is named, but {OBJECTIVE} features ({origins[OBJECTIVE]}) needs one; name a timm model "
            f"or a run, as in -opts {TEACHER}=vit_base_patch16_224 or {TEACHER}=output/train-.../best.pth"
        )
    rules = _with_features if values[OBJECTIVE] == "features" else _without_features
    for is_wrong, key, problem in rules(values, origins):
        if is_wrong:
            raise ConfigError(f"{key}, {to_text(values[key])} ({origins[key]}), {problem}")


def _without_features(values: dict[str, Any], origins: dict[str, str]) -> Iterator[tuple[bool, str, str]]:
    key, needed = "DATA.DATASET", f"{OBJECTIVE}=features (docs/unlabelled.md)"
    problem = f"has no labels, which {OBJECTIVE} classes needs; set {needed}, or use -dataset imagefolder for classes"
    yield values[key] == "images", key, problem
    yield values[METRIC] in METRICS, METRIC, f"measures features; set {needed}, or choose another metric"


def _with_features(values: dict[str, Any], origins: dict[str, str]) -> Iterator[tuple[bool, str, str]]:
    with_features = f"with {OBJECTIVE}, features ({origins[OBJECTIVE]})"
    for key in OF_CLASSES:
        problem = f"must be {to_text(SETTINGS[key].default)} {with_features}, which has no classes"
        yield values[key] != SETTINGS[key].default, key, problem
    for key in OF_MIXING:
        problem = f"must be off ({to_text(SETTINGS[key].default)}) {with_features}: it mixes the labels of images"
        yield bool(values[key]), key, problem
    key = "TRAIN.SMOOTHING"
    is_typed = origins[key].startswith(("flag ", "-opts"))
    yield bool(values[key]) and is_typed, key, f"has no effect {with_features}, which has no classes; leave it out"
    if several := several_labels_key(values):
        yield True, several, f"has no effect {with_features}, which has no classes; leave it out"
    choices = f"must be similarity, knn or loss {with_features}, which has no classes"
    yield values[METRIC] not in (*METRICS, "loss"), METRIC, choices
    problem = "needs labelled images; set DATA.LABELLED_PATH to a folder with a folder for each class"
    yield values[METRIC] == "knn" and not values["DATA.LABELLED_PATH"], METRIC, problem
