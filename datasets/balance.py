"""Classes of unequal size: weights that the loss gives them, and epochs that repeat images of rare ones."""

import csv
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import AUTO, Config
from datasets.shuffle import EpochOrder, FullShuffle, draws
from datasets.types import ImageSet
from utils.errors import ConfigError, DataError, did_you_mean
from utils.files import read_names
from utils.text import counted, first_of

SAMPLER = "DATA.SAMPLER balanced"
LIGHTEST, HEAVIEST = 1e-6, 1e6  # weights; in float32 1e-46 is 0, and 1e39 infinite
CLASS_BITS = 24  # of a key of 64 by which images are sorted; below the class are bits of a random number


def class_weights(config: Config, image_set: ImageSet) -> list[float] | None:
    """TRAIN.CLASS_WEIGHTS for each of the model's outputs, of which one without a class counts 1; None if not set.

    auto: images / (classes x images of the class), so that the mean over the images is 1.
    """
    if config.TRAIN.CLASS_WEIGHTS is None:
        return None
    classes = image_set.classes
    if config.TRAIN.CLASS_WEIGHTS == AUTO:
        counts = images_of_each_class(image_set, "TRAIN.CLASS_WEIGHTS auto")
        weights = (counts.sum() / (len(counts) * counts)).tolist()
    else:
        weights = _read_weights(Path(config.TRAIN.CLASS_WEIGHTS).expanduser(), classes)
    return weights + [1.0] * ((config.MODEL.NUM_CLASSES or len(classes)) - len(classes))


def describe_balance(config: Config, image_set: ImageSet, weights: list[float] | None) -> list[str]:
    """Describe what a run does about classes of unequal size: weights, and how often an epoch has each image."""
    lines, classes = [], image_set.classes
    if weights:
        lines.append(f"class weights ({config.TRAIN.CLASS_WEIGHTS}): {_range(classes, weights[: len(classes)])}")
    if config.DATA.SAMPLER == "balanced":
        counts = images_of_each_class(image_set, SAMPLER)
        times = (len(image_set) / len(counts) / counts).tolist()
        lines.append(f"{SAMPLER}: an epoch has an image on average so many times: {_range(classes, times)}")
        if config.TRAIN.CLASS_WEIGHTS == AUTO:
            lines.append(
                f"warning: {SAMPLER} and TRAIN.CLASS_WEIGHTS auto each make up for classes of few images: together they give "
                "these too much weight; leave one of them out"
            )
    return lines


def _range(classes: list[str], values: list[float]) -> str:
    low, high = (function(zip(values, classes, strict=True)) for function in (min, max))
    return f"from {low[0]:.3g} ({low[1]}) to {high[0]:.3g} ({high[1]})"


def images_of_each_class(image_set: ImageSet, setting: str) -> np.ndarray:
    """int64 [classes]; DataError if one has none, for `setting` needs some of each."""
    counts = image_set.count_classes()
    if not counts.all():
        missing = [image_set.classes[number] for number in np.flatnonzero(counts == 0)]
        raise DataError(
            f"{setting} needs training images of every class, but there are none of {first_of(missing)}; add some, or "
            "take these classes out of the data"
        )
    return counts


def _read_weights(file: Path, classes: list[str]) -> list[float]:
    """The weights in a file that has each class once, by name or number."""
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
                f"{setting}: the weight of class {name!r} is {text!r}; it must be a number from {LIGHTEST:g} to {HEAVIEST:g}"
            )
    missing = [name for number, name in enumerate(classes) if number not in weights]
    if missing:
        raise ConfigError(
            f"{setting} has no weight for {counted(len(missing), 'class')}: {first_of(missing)}; add a line for each, 1 "
            "changes nothing"
        )
    return [weights[number] for number in range(len(classes))]


def _read_rows(file: Path) -> list[list[str]]:
    """Class and weight of each line of a CSV file, with or without a header."""
    setting = f"TRAIN.CLASS_WEIGHTS: {file}"
    expects = "name a CSV file with a class and its weight in each line, such as `cat,2.5`, or auto"
    try:
        rows = [[value.strip() for value in row] for row in csv.reader(read_names(file).splitlines()) if row]
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"{setting} cannot be read ({error}); {expects}") from error
    has_header = bool(rows) and rows[0][-1].lower() in ("weight", "weights")
    rows = rows[has_header:]
    if not rows or any(len(row) != 2 for row in rows):
        raise ConfigError(f"{setting} has other lines than a class and its weight; {expects}")
    return rows


def choose_order(config: Config, image_set: ImageSet) -> Callable[[int, int], EpochOrder]:
    """The order of an epoch by seed and epoch, as DATA.SAMPLER says."""
    if config.DATA.SAMPLER == "shuffle":
        return image_set.epoch_order
    counts = images_of_each_class(image_set, SAMPLER)
    return partial(BalancedOrder, image_set.targets, counts)


class BalancedOrder(EpochOrder):
    """An epoch of as many places as images, shared among the classes in equal parts.

    A class of fewer images than places repeats all of them equally often, but for a random part of them in the last round;
    of the others a random part occurs. Besides the targets, it takes 4 bytes of memory for each image.
    """

    def __init__(self, targets: np.ndarray, counts: np.ndarray, seed: int, epoch: int):
        """`counts`: the images of each class."""
        self._targets, self._counts, self._seeds = targets, counts, (seed, epoch)
        # One random start in [0, 1) for all edges: each class gets its share on average, also one of less than a place.
        # The last seed, 3 here and 4 below, keeps these draws apart from each other and from FullShuffle's.
        start = (draws((seed, epoch, 3), 0, 1)[0] >> np.uint64(11)) / 2.0**53
        edges = np.floor(len(targets) * np.arange(1, len(counts) + 1) / len(counts) + start)
        self._places = np.concatenate([[0], edges]).astype(np.int64)
        self._shuffle = FullShuffle(len(targets), seed, epoch)

    @property
    def edges(self) -> Sequence[int]:
        return self._shuffle.edges

    def block(self, number: int) -> np.ndarray:
        places = self._shuffle.block(number).astype(np.int64)
        classes = np.searchsorted(self._places, places, "right") - 1
        within = (places - self._places[classes]) % self._counts[classes]
        return self._by_class[(np.cumsum(self._counts) - self._counts)[classes] + within]

    @cached_property
    def _by_class(self) -> np.ndarray:
        """The images class by class, those of a class in a random order."""
        keys = draws((*self._seeds, 4), 0, len(self._targets)) >> np.uint64(CLASS_BITS)
        keys |= self._targets.astype(np.uint64) << np.uint64(64 - CLASS_BITS)
        return np.argsort(keys, kind="stable").astype(np.uint32)
