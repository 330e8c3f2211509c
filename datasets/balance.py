"""Balance classes of unequal size: class weights in the loss, and epochs that repeat images of rare classes."""

from functools import partial
from pathlib import Path

import numpy as np

from configs.schema import AUTO, Config
from datasets.order import EpochOrder, balanced_order
from datasets.types import ImageSet
from datasets.weights_file import read_weights
from utils.errors import DataError
from utils.text import first_of

SAMPLER = "DATA.SAMPLER balanced"


def read_class_weights(config: Config, image_set: ImageSet) -> list[float]:
    """Return TRAIN.CLASS_WEIGHTS for each output of the model. An output without a class has weight 1.

    auto: the weight of a class is images / (classes x images of the class), so that the mean weight of all images is 1.
    """
    classes = image_set.classes
    if config.TRAIN.CLASS_WEIGHTS == AUTO:
        counts = images_of_each_class(image_set, "TRAIN.CLASS_WEIGHTS auto")
        weights = (counts.sum() / (len(counts) * counts)).tolist()
    else:
        weights = read_weights(Path(config.TRAIN.CLASS_WEIGHTS).expanduser(), classes)
    return weights + [1.0] * ((config.MODEL.NUM_CLASSES or len(classes)) - len(classes))


def describe_balance(config: Config, image_set: ImageSet, weights: list[float] | None) -> list[str]:
    """Describe how a run balances its classes: the class weights, and how often an image occurs in an epoch."""
    lines, classes = [], image_set.classes
    if weights:
        lines.append(f"class weights ({config.TRAIN.CLASS_WEIGHTS}): {_range(classes, weights[: len(classes)])}")
    if config.DATA.SAMPLER == "balanced":
        counts = images_of_each_class(image_set, SAMPLER)
        times = (len(image_set) / len(counts) / counts).tolist()
        lines.append(f"{SAMPLER}: average occurrences of an image in an epoch: {_range(classes, times)}")
        if config.TRAIN.CLASS_WEIGHTS == AUTO:
            lines.append(
                f"warning: {SAMPLER} and TRAIN.CLASS_WEIGHTS auto both compensate for rare classes, so using both "
                "gives these classes too much weight; leave one of the two settings out"
            )
    return lines


def _range(classes: list[str], values: list[float]) -> str:
    low, high = (function(zip(values, classes, strict=True)) for function in (min, max))
    return f"from {low[0]:.3g} ({low[1]}) to {high[0]:.3g} ({high[1]})"


def images_of_each_class(image_set: ImageSet, setting: str) -> np.ndarray:
    """Return int64 [classes]: the number of images per class. Raise DataError about `setting` if a class has none."""
    counts = image_set.count_classes()
    if not counts.all():
        missing = [image_set.classes[number] for number in np.flatnonzero(counts == 0)]
        raise DataError(
            f"{setting} needs training images of every class, but there are none of {first_of(missing)}; add some, or "
            "take these classes out of the data"
        )
    return counts


def order_of_balanced_epochs(image_set: ImageSet) -> EpochOrder:
    """Return the function for the order of an epoch with DATA.SAMPLER balanced."""
    return partial(balanced_order, image_set.targets, images_of_each_class(image_set, SAMPLER))
