"""Balance classes of unequal size: class weights in the loss, and epochs that repeat images of rare classes."""

import csv
import math
from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import AUTO, Config
from datasets.image_set import ImageSet
from datasets.order import EpochOrder, balanced_order
from utils.errors import ConfigError, DataError, did_you_mean
from utils.files import read_names
from utils.text import counted, first_of, warning

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
                warning(
                    f"{SAMPLER} and TRAIN.CLASS_WEIGHTS auto both compensate for rare classes, so using both "
                    "gives these classes too much weight; leave one of the two settings out"
                )
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


# --- a file of class weights ---


LIGHTEST, HEAVIEST = 1e-6, 1e6  # limits of a weight; in float32, 1e-46 would be 0 and 1e39 infinite


def read_weights(file: Path, classes: list[str]) -> list[float]:
    """Return the class weights from a file that lists each class once, by name or number."""
    setting = f"TRAIN.CLASS_WEIGHTS: {file}"
    numbers = {str(number): number for number in range(len(classes))}
    numbers |= {normalize("NFC", name): number for number, name in enumerate(classes)}
    weights: dict[int, float] = {}
    for name, text in _read_rows(file):
        number = numbers.get(normalize("NFC", name))
        if number is None:
            raise ConfigError(f"{setting}: the data has no class {name!r}{did_you_mean(name, classes)}")
        if number in weights:
            raise ConfigError(f"{setting} has class {classes[number]!r} twice; remove one of its weights")
        try:
            weights[number] = float(text)
        except ValueError:
            weights[number] = math.nan
        if not LIGHTEST <= weights[number] <= HEAVIEST:
            raise ConfigError(
                f"{setting}: the weight of class {name!r} is {text!r}; it must be a number from {LIGHTEST:g} "
                f"to {HEAVIEST:g}"
            )
    missing = [name for number, name in enumerate(classes) if number not in weights]
    if missing:
        raise ConfigError(
            f"{setting} has no weight for {counted(len(missing), 'class')}: {first_of(missing)}; add a line for each; "
            "a weight of 1 changes nothing"
        )
    return [weights[number] for number in range(len(classes))]


def _read_rows(file: Path) -> list[list[str]]:
    """Return class and weight of each line of a CSV file, with or without a header."""
    setting = f"TRAIN.CLASS_WEIGHTS: {file}"
    expects = "name a CSV file with a class and its weight in each line, such as `cat,2.5`, or auto"
    try:
        rows = [[value.strip() for value in row] for row in csv.reader(read_names(file).splitlines()) if row]
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"{setting} cannot be read ({error}); {expects}") from error
    if rows and rows[0][-1].lower() in ("weight", "weights"):  # a header
        del rows[0]
    if not rows or any(len(row) != 2 for row in rows):
        raise ConfigError(f"{setting} has lines that are not a class and its weight; {expects}")
    return rows
