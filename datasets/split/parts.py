"""The two parts of a split: their rows, warnings of classes that one of them lacks, and how a record names images."""

import numpy as np

from datasets.image_set import Table
from utils.text import first_of, warning

PARTS = ("train", "val")
FOLDS = "folds"  # the rule of DATA.FOLD
# Key in the record of a split by hash: the folders that are left out of image keys, if they differ from the classes.
CLASS_FOLDERS = "class_folders"


def warn_of_lacking_classes(
    classes: list[str], num_trained: np.ndarray, num_validation: np.ndarray, nouns: str = "classes"
) -> list[str]:
    """Warn of classes whose images are all in the same part. The arrays have the number of images of each class."""
    notes = []
    for part, counts in (("training", num_trained), ("validation", num_validation)):
        without = np.flatnonzero((num_trained + num_validation > 0) & (counts == 0))
        if len(without):
            names = first_of([classes[number] for number in without])
            notes.append(warning(f"{nouns} without {part} images: {names}"))
    return notes


def warn_of_split_classes(image_set: Table, held_out: np.ndarray) -> list[str]:
    """Warn of classes whose images a split puts into the same part."""
    counts = (image_set.count_classes(chosen) for chosen in (~held_out, held_out))
    return warn_of_lacking_classes(image_set.classes, *counts, image_set.meaning.part_nouns)


def rows_of_parts(image_set: Table, held_out: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows and targets of both parts. `held_out`: bool [N]."""
    columns = {}
    for part, chosen in zip(PARTS, (~held_out, held_out), strict=True):
        rows = np.flatnonzero(chosen)
        columns[f"{part}.row"] = rows.astype("<u4")
        columns[f"{part}.target"] = image_set.targets[rows].astype("<i4")
    return columns


def hashes_names(record: dict) -> bool:
    """Return whether a record holds images out by a hash of their names, and not by position or by DATA.GROUP_BY.

    A name is hashed without its class folder, so that an image that is moved to another class stays in its part.
    """
    return record["rule"] == "hash" and "group_by" not in record
