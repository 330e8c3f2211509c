"""Convert the labels of a data set to class numbers, and check them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.targets.one_class import OneClass, count_classes
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import counted

MAX_CLASSES = 1_000_000  # a label this high is a mistake, and a list of so many class names would fill the memory
USUAL_CLASSES = 1000  # up to this many classes, a set may have fewer images than classes, such as part of ImageNet
MAX_DIGITS = 18  # digits of the longest label that is read as a number; int() refuses thousands of digits


@dataclass(frozen=True)
class Labels:
    """The distinct labels of one list, as written, in order of first occurrence."""

    file: Path
    written: list[str]
    lines: np.ndarray  # the first line with each label
    counts: np.ndarray  # the number of images with each label

    def where(self, index: int) -> str:
        return f"{self.file}, line {self.lines[index]}"


def _is_number(label: str) -> bool:
    try:
        float(label)  # this also accepts nan, which pandas writes for missing numbers
    except ValueError:
        return False
    return True


class OneLabel:
    """Labels that are each the name or the number of a class."""

    def __init__(self, allow_names: bool):
        self._allow_names = allow_names

    def are_numbers(self, lists: list[Labels]) -> bool:
        """Return whether more than half of the images have a numeric label. If so, other labels are typos, not names."""
        if not self._allow_names:
            return True
        numbers = sum(
            int(each.counts[index]) for each in lists for index, label in enumerate(each.written) if _is_number(label)
        )
        return 2 * numbers > sum(int(each.counts.sum()) for each in lists)

    def numbers(self, config: Config, lists: list[Labels]) -> tuple[list[np.ndarray], list[str]]:
        """Return the target number of each list's labels, and the classes. If there are two lists, the first is for
        training and must have all classes. Labels that are not numbers are class names, numbered in sorted order."""
        if self.are_numbers(lists):
            targets = [_numbered_targets(config, labels) for labels in lists]
            num_images = sum(int(each.counts.sum()) for each in lists)
            classes = numbered_classes(config, targets, [each.where for each in lists], num_images)
        else:
            names = {label: normalize("NFC", label) for labels in lists for label in labels.written}
            classes = sorted(set(names.values()))
            number = {name: index for index, name in enumerate(classes)}
            targets = [np.array([number[names[label]] for label in labels.written], np.int32) for labels in lists]
        return targets, classes

    def meanings(self, config: Config, lists: list[Labels], classes: list[str]) -> list[OneClass]:
        """Return what the targets of each list mean."""
        return [OneClass()] * len(lists)

    def describe(self, config: Config, train: ImageSet) -> tuple[str, ...]:
        """Return lines for the log."""
        return ()


def _numbered_targets(config: Config, labels: Labels) -> np.ndarray:
    """Return the labels as class numbers."""
    targets = np.empty(len(labels.written), dtype=np.int32)
    num_classes = config.MODEL.NUM_CLASSES
    for index, written in enumerate(labels.written):
        whole, _, decimals = written.partition(".")
        label = written if decimals.strip("0") else whole  # 3.0 is 3
        is_number = label.isascii() and label.isdecimal() and len(label) <= MAX_DIGITS
        if not is_number or int(label) >= MAX_CLASSES:
            raise DataError(
                f"{labels.where(index)}: label {shortened(written)!r} is not a class number from 0 to "
                f"{MAX_CLASSES - 1:,}; correct it (in a CSV of class names, at most half the labels may be numbers)"
            )
        target = int(label)
        if num_classes is not None and target >= num_classes:
            raise DataError(
                f"{labels.where(index)}: label {target} needs at least {counted(target + 1, 'class')}, but "
                f"MODEL.NUM_CLASSES is {num_classes}; labels count from 0. Correct the label, or set -num_classes"
            )
        targets[index] = target
    return targets


def shortened(label: str) -> str:
    """Return a label for messages, cut after 40 characters."""
    return label if len(label) <= 40 else f"{label[:40]}... ({len(label):,} characters)"


def numbered_classes(
    config: Config, targets: list[np.ndarray], where: list[Callable[[int], str]], num_images: int | None = None
) -> list[str]:
    """Return the classes of numeric labels: all numbers up to the highest label.

    Raise DataError if there are far more classes than images, because a typo would make the model huge. `targets`: the
    labels of each part; `where`: for each part, a function that names an image or line; `num_images`: the number of
    images, if it differs from the number of targets.
    """
    counts, num_images = [count_classes(each) for each in targets], num_images or sum(map(len, targets))
    used = np.zeros(max(map(len, counts), default=0), bool)
    for each in counts:
        used[: len(each)] |= each > 0
    if config.MODEL.NUM_CLASSES is None and len(used) > max(USUAL_CLASSES, num_images, 2 * int(used.sum())):
        part = next(part for part, each in enumerate(counts) if len(each) == len(used))
        raise DataError(
            f"{where[part](int(targets[part].argmax()))}: label {len(used) - 1} means {counted(len(used), 'class')}, "
            f"but {counted(num_images, 'image')} use {int(used.sum()):,}; correct the label, or, if it is right, set "
            f"-num_classes {len(used)}"
        )
    return [str(number) for number in range(len(used))]
