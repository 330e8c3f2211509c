"""Images named by a list: what list files and CSV files share, and every check on what they say."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.sources.images import FileImages, is_within
from utils.errors import DataError, did_you_mean

NUM_LOOKED_AT = 10  # files of each list that must exist at the start; to look at all of ImageNet's takes minutes
MOST_CLASSES = 1_000_000  # a label above this is a mistake, and a list of that many class names would fill the memory
USUAL_CLASSES = 1000  # so many are no mistake with however few images: some of ImageNet's, to try something out
MOST_DIGITS = 18  # of a label: more are no class number, and Python itself refuses thousands of them


@dataclass(frozen=True)
class Listing:
    """The lines of one list: path and label as written, and the line's number."""

    file: Path
    paths: list[str]
    labels: list[str]
    lines: list[int]

    def where(self, index: int) -> str:
        return f"{self.file}, line {self.lines[index]}"

    @property
    def is_numbered(self) -> bool:
        """Whether every label is a number, rather than a class name."""
        return all(label.removeprefix("-").isdecimal() for label in self.labels)


def to_image_set(config: Config, listing: Listing, targets: np.ndarray, classes: list[str]) -> FileImages:
    """The listed images, relative to the list's folder, out of which no path may lead."""
    root = listing.file.parent
    _check_paths(listing, root)
    return FileImages(root, listing.paths, targets, classes, config.DATA.IMAGE_CHANNELS, confined=True)


def _check_paths(listing: Listing, root: Path) -> None:
    known_folders = set()
    for index, path in enumerate(listing.paths):
        folder = os.path.dirname(path)
        # An absolute path, '..' or a link to another folder: all of them show in where the folder really is.
        if folder not in known_folders and not is_within(root, root / folder):
            raise DataError(
                f"{listing.where(index)}: {path!r} leads out of {root}; paths are relative to that folder and must stay "
                "in it, with their links followed too"
            )
        known_folders.add(folder)
        if index < NUM_LOOKED_AT and not os.path.isfile(root / path):
            raise DataError(
                f"{listing.where(index)}: there is no file {root / path}; paths are relative to the folder of the list"
            )


def numbered_targets(config: Config, listing: Listing) -> np.ndarray:
    """Labels that are class numbers."""
    targets = np.empty(len(listing.labels), dtype=np.int64)
    num_classes = config.MODEL.NUM_CLASSES
    for index, label in enumerate(listing.labels):
        if not (label.isascii() and label.isdecimal()):
            problem = "is negative" if label.startswith("-") else "is not a whole number"
            raise DataError(
                f"{listing.where(index)}: label {shortened(label)!r} {problem}; labels count the classes from 0"
            )
        if len(label) > MOST_DIGITS or int(label) >= MOST_CLASSES:
            raise DataError(
                f"{listing.where(index)}: label {shortened(label)} is no class number; labels count from 0, and there may "
                f"be {MOST_CLASSES:,} classes at most"
            )
        target = int(label)
        if num_classes is not None and target >= num_classes:
            raise DataError(
                f"{listing.where(index)}: label {target} needs at least {target + 1} classes, but MODEL.NUM_CLASSES is "
                f"{num_classes}; labels count from 0. Mend the label, or set -num_classes"
            )
        targets[index] = target
    return targets


def shortened(label: str) -> str:
    """As a message shows it."""
    return label if len(label) <= 40 else f"{label[:40]}... ({len(label):,} characters)"


def class_numbers(config: Config, listings: list[Listing], *, allow_names: bool) -> tuple[list[np.ndarray], list[str]]:
    """Targets of each list, and the classes. Of two lists the first is training's and must hold the other's classes.

    Labels that are all numbers count the classes; others are names, where allowed, and numbered in sorted order.
    """
    if not allow_names or all(listing.is_numbered for listing in listings):
        targets = [numbered_targets(config, listing) for listing in listings]
        check_filled(config, targets, [listing.where for listing in listings])
        highest = max((int(each.max()) for each in targets if len(each)), default=-1)
        classes = [str(number) for number in range(highest + 1)]
    else:
        classes = sorted({label for listing in listings for label in listing.labels})
        number = {name: index for index, name in enumerate(classes)}
        targets = [np.array([number[label] for label in listing.labels], np.int64) for listing in listings]
    if len(listings) == 2:
        _check_same_classes(*listings, *targets)
    return targets, classes


def check_filled(config: Config, targets: list[np.ndarray], where: list[Callable[[int], str]]) -> None:
    """Refuse a label that makes far more classes than there are images: a slip of the keyboard, and a huge model.

    `targets` of all parts of a data set, and for each part what messages call an image of it.
    """
    labels = np.concatenate([*targets, np.empty(0, np.int64)])
    highest, num_used = int(labels.max(initial=-1)), len(np.unique(labels))
    if config.MODEL.NUM_CLASSES is None and highest >= max(USUAL_CLASSES, len(labels), 2 * num_used):
        part = next(part for part, each in enumerate(targets) if highest in each)
        raise DataError(
            f"{where[part](int(targets[part].argmax()))}: label {highest} makes {highest + 1:,} classes, of which "
            f"{len(labels):,} images fill {num_used:,}; mend the label or, if it is right, set -num_classes {highest + 1}"
        )


def _check_same_classes(train: Listing, val: Listing, train_targets: np.ndarray, val_targets: np.ndarray) -> None:
    unknown = np.flatnonzero(~np.isin(val_targets, train_targets))
    if len(unknown):
        label = val.labels[unknown[0]]
        raise DataError(
            f"{val.where(unknown[0])}: class {label} does not occur in {train.file}, and what is not trained cannot be "
            f"validated; mend the label, or remove the line{did_you_mean(label, set(train.labels))}"
        )
