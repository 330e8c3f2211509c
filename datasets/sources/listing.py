"""Images named by a list file or CSV file, and the checks of such lists."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.sources.images import FileImages, is_within
from datasets.transforms.pixel_rules import PixelRules
from utils.errors import DataError, did_you_mean
from utils.text import counted, first_of

NUM_CHECKED = 10  # files of each list that must exist at the start; all of ImageNet's would take minutes
MAX_CLASSES = 1_000_000  # a higher label is a mistake, and a list of that many class names would fill the memory
USUAL_CLASSES = 1000  # accepted with any number of images: a few of ImageNet's, to try something out
MAX_DIGITS = 18  # of a label; Python itself refuses thousands of them


@dataclass(frozen=True)
class Listing:
    """The lines of one list: path and label as written, and the line number. `notes`: lines for the log."""

    file: Path
    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  # of each line the value of DATA.GROUP_BY; empty without it
    notes: list[str] = field(default_factory=list)

    def where(self, index: int) -> str:
        return f"{self.file}, line {self.lines[index]}"


def to_image_sets(config: Config, listings: list[Listing], *, allow_names: bool) -> list[FileImages]:
    """The images of each list, in evaluation of the last one only. Of two lists the first is for training.

    Paths are relative to the folder of the list and must not lead out of it.
    """
    are_numbers = not allow_names or _are_mostly_numbers(listings)
    targets, classes = class_numbers(config, listings, are_numbers)
    image_sets = []
    for listing, its_targets in list(zip(listings, targets, strict=True))[-1 if config.EVAL else 0 :]:
        root = listing.file.parent
        _check_paths(listing, root)
        image_set = FileImages(root, listing.paths, its_targets, classes, PixelRules.of(config.DATA), confined=True)
        image_set.labels_are_numbers, image_set.classes_are_names = are_numbers, not are_numbers
        if listing.groups:
            image_set.groups, image_set.per_image = np.array(listing.groups), (*image_set.per_image, "groups")
        image_set.split = {"rule": "folders", "training": str(listings[0].file), "validation": str(listings[-1].file)}
        image_sets.append(image_set)
    notes = [note for listing in listings for note in (*listing.notes, *_repeated_paths(listing))]
    if len(image_sets) == 2:
        notes += _in_both(config, *listings)
    image_sets[-1].notes = tuple(notes)
    return image_sets


def _are_mostly_numbers(listings: list[Listing]) -> bool:
    """Whether more than half of the labels are numbers: then the others are slips, not names of classes."""
    labels = [label for listing in listings for label in listing.labels]
    return 2 * sum(map(_is_number, labels)) > len(labels)


def _is_number(label: str) -> bool:
    try:
        float(label)  # also nan, which pandas writes
    except ValueError:
        return False
    return True


def _repeated_paths(listing: Listing) -> list[str]:
    first, repeated, contrary = {}, [], 0
    for index, path in enumerate(map(_plain, listing.paths)):
        if (before := first.setdefault(path, index)) != index:
            repeated.append(path)
            contrary += listing.labels[before] != listing.labels[index]
    if not repeated:
        return []
    other_class = f", {contrary:,} of them with another class" if contrary else ""
    return [
        f"warning: {listing.file}: lines that repeat the path of an earlier one, and in a split are in the same part: "
        f"{len(repeated):,}{other_class} ({first_of(repeated)})"
    ]


def _in_both(config: Config, train: Listing, val: Listing) -> list[str]:
    """Warnings about validation images that are trained on; an error if all are."""
    trained, notes = set(map(_plain, train.paths)), []
    shared = [path for path in map(_plain, val.paths) if path in trained]
    if shared and len(shared) == len(val.paths):
        raise DataError(
            f"{val.file}: all its images are also in {train.file}, so validation would score images that were trained "
            "on; list others"
        )
    if shared:
        notes.append(
            f"warning: images of {val.file} that are also in {train.file}: {len(shared):,} ({first_of(shared)})"
        )
    groups = sorted(set(train.groups) & set(val.groups))
    if groups:
        notes.append(
            f"warning: values of DATA.GROUP_BY {config.DATA.GROUP_BY} that are in {train.file} and in {val.file}: "
            f"{len(groups):,} ({first_of(groups)})"
        )
    return notes


def _plain(path: str) -> str:
    """The path without '.', '..' and double slashes; most have none, and then it costs no memory."""
    return os.path.normpath(path) if "./" in path or "//" in path else path


def _check_paths(listing: Listing, root: Path) -> None:
    known_folders = set()
    for index, path in enumerate(listing.paths):
        folder = os.path.dirname(path)
        # The resolved folder covers absolute paths, '..' and links to other folders.
        if folder not in known_folders and not is_within(root, root / folder):
            raise DataError(
                f"{listing.where(index)}: {path!r} leads out of {root}; paths are relative to that folder and must "
                "stay in it, also through links"
            )
        known_folders.add(folder)
        if index < NUM_CHECKED and not os.path.isfile(root / path):
            raise DataError(
                f"{listing.where(index)}: no file {root / path}; paths are relative to the folder of the list"
                + (" and have / between folders, also on Windows" if "\\" in path else "")
            )


def numbered_targets(config: Config, listing: Listing) -> np.ndarray:
    """The labels as class numbers."""
    targets = np.empty(len(listing.labels), dtype=np.int64)
    num_classes = config.MODEL.NUM_CLASSES
    for index, written in enumerate(listing.labels):
        whole, _, decimals = written.partition(".")
        label = written if decimals.strip("0") else whole  # 3.0 is 3
        if not (label.isascii() and label.isdecimal()):
            problem = "is negative" if label.startswith("-") else "is not a whole number"
            raise DataError(
                f"{listing.where(index)}: label {shortened(written)!r} {problem}; labels count the classes from 0. Correct "
                "it, or where labels are names of classes let less than half of them be numbers"
            )
        if len(label) > MAX_DIGITS or int(label) >= MAX_CLASSES:
            raise DataError(
                f"{listing.where(index)}: label {shortened(label)} is not a class number; labels count from 0, and at "
                f"most {MAX_CLASSES:,} classes are supported"
            )
        target = int(label)
        if num_classes is not None and target >= num_classes:
            raise DataError(
                f"{listing.where(index)}: label {target} needs at least {counted(target + 1, 'class')}, but MODEL.NUM_CLASSES is "
                f"{num_classes}; labels count from 0. Correct the label, or set -num_classes"
            )
        targets[index] = target
    return targets


def shortened(label: str) -> str:
    """The label as messages show it."""
    return label if len(label) <= 40 else f"{label[:40]}... ({len(label):,} characters)"


def class_numbers(config: Config, listings: list[Listing], are_numbers: bool) -> tuple[list[np.ndarray], list[str]]:
    """Targets of each list, and the classes. Of two lists the first is for training and must have all classes.

    Labels that are no numbers are names, numbered as sorted.
    """
    if are_numbers:
        targets = [numbered_targets(config, listing) for listing in listings]
        check_label_range(config, targets, [listing.where for listing in listings])
        highest = max((int(each.max()) for each in targets if len(each)), default=-1)
        classes = [str(number) for number in range(highest + 1)]
    else:
        names = {label: normalize("NFC", label) for listing in listings for label in listing.labels}
        classes = sorted(set(names.values()))
        number = {name: index for index, name in enumerate(classes)}
        targets = [np.array([number[names[label]] for label in listing.labels], np.int64) for listing in listings]
    if len(listings) == 2:
        _check_same_classes(*listings, *targets)
    return targets, classes


def check_label_range(config: Config, targets: list[np.ndarray], where: list[Callable[[int], str]]) -> None:
    """Refuse a label that implies far more classes than there are images: a typing error, and a huge model.

    `targets`: of each part of a data set; `where`: for each part, the name of an image in messages.
    """
    labels = np.concatenate([*targets, np.empty(0, np.int64)])
    highest, num_used = int(labels.max(initial=-1)), len(np.unique(labels))
    if config.MODEL.NUM_CLASSES is None and highest >= max(USUAL_CLASSES, len(labels), 2 * num_used):
        part = next(part for part, each in enumerate(targets) if highest in each)
        raise DataError(
            f"{where[part](int(targets[part].argmax()))}: label {highest} means {counted(highest + 1, 'class')}, but "
            f"{counted(len(labels), 'image')} use {num_used:,}; correct the label, or if right set -num_classes {highest + 1}"
        )


def _check_same_classes(train: Listing, val: Listing, train_targets: np.ndarray, val_targets: np.ndarray) -> None:
    unknown = np.flatnonzero(~np.isin(val_targets, train_targets))
    if len(unknown):
        label = val.labels[unknown[0]]
        raise DataError(
            f"{val.where(unknown[0])}: class {label} does not occur in {train.file}, so it would never be "
            f"trained; correct the label, or remove the line{did_you_mean(label, set(train.labels))}"
        )
