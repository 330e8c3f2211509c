"""Find images that moved from training to validation because the classes in a list changed but its folders did not."""

from collections.abc import Sequence

import numpy as np

from datasets.split import CLASS_FOLDERS, class_folders_of
from datasets.split.by_hash import hashes_of, is_drawn
from datasets.types import ImageSet
from utils.text import first_of


def trained_by_other_folders(val: ImageSet, former: Sequence[str], record: dict) -> np.ndarray:
    """Return the indices of validation images that were training images in a run with this record and the classes
    `former`. An image's part can change with the classes, because the hash of its name leaves out class folders."""
    if val.is_listing or not val.class_folders:
        return np.zeros(0, np.int64)
    seed = record["seed"]
    then = hashes_of(val.split_keys(), seed, class_folders_of(val, {CLASS_FOLDERS: former} | record))
    now = hashes_of(val.split_keys(), seed, val.class_folders)
    return np.flatnonzero((then != now) & ~is_drawn(then, record))


def warn_of_other_folders(val: ImageSet, former: Sequence[str], record: dict, weights: str) -> list[str]:
    """Warn of validation images that the weights were trained on. `weights`: setting and value, for the message."""
    found = trained_by_other_folders(val, former, record).tolist()
    if not found:
        return []
    changed = first_of(sorted({*former} ^ {*val.classes}))
    return [
        f"warning: if {weights} was trained on this data, {len(found):,} of {len(val):,} validation images were "
        f"training images, such as {val.key(found[0])}: the hash of a name leaves out folders that are named like a "
        f"class, and these classes are new or gone: {changed}; divide the data into the parts that "
        "split.csv of that run lists"
    ]
