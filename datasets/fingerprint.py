"""Facts that identify a data set: in another process, in a resumed run, and when runs are compared."""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from datasets.types import ImageSet
from utils.runs import OF_A_PART, SIZES, changed_facts
from utils.text import counted, first_of

NUM_SIZES = 64  # files of each part whose sizes are compared; all sizes would take minutes on a network disk
MOST_LISTED = 2_000_000  # with more images than this, split.csv is not compared
CLASSES = "classes and their order"


def data_facts(train: ImageSet | None, val: ImageSet) -> dict[str, int | str]:
    """Return {name of a fact: number or digest} for the training images, if there are any, and the validation images.

    Paths are relative to the data folder. The facts of a million images take milliseconds, because an index stores
    checksums of the names.
    """
    facts: dict[str, int | str] = {
        CLASSES: _digest([name.encode(errors="surrogateescape") + b"\0" for name in val.classes])
    }
    for part, image_set in (("training", train), ("validation", val)):
        if image_set is None or not len(image_set):
            continue
        places = np.linspace(0, len(image_set) - 1, NUM_SIZES).astype(int).tolist()
        rows = sorted(set(places))  # np.unique would import numpy.ma, which takes 20 ms
        names, labels, sizes = (fact.format(part) for fact in OF_A_PART)
        facts |= {
            f"{part} images": len(image_set),
            names: _digest(image_set.naming()),
            labels: _digest(image_set.meaning.content(image_set.classes, image_set.targets)),
            sizes: " ".join(map(str, image_set.file_sizes(rows))),
        }
    return facts


def is_other_data(facts: Mapping[str, Any], val: ImageSet) -> bool:
    """Return whether the file sizes of the validation images differ from the sizes in the facts of a run."""
    return any(fact.startswith(SIZES) for fact in changed_facts(facts, data_facts(None, val)))


def _digest(content: Iterable[bytes | np.ndarray]) -> str:
    digest = hashlib.sha256()
    for each in content:
        digest.update(each)
    return digest.hexdigest()[:12]


def describe_changed_images(file: Path, train: ImageSet, val: ImageSet) -> tuple[list[str], bool]:
    """Describe how the images differ from a run's split.csv, and return whether images were only added.

    The description is empty if the file is missing, or if there are too many images to compare.
    """
    if not file.is_file() or len(train) + len(val) > MOST_LISTED:
        return [], False
    then = [row[0] for row in read_split(file)]
    now = [key.decode(errors="surrogateescape") for part in (train, val) for keys in part.all_keys() for key in keys]
    gone, new = Counter(then) - Counter(now), Counter(now) - Counter(then)
    if not (gone or new):
        return ["the same images in another order"] * (then != now), False
    is_only_added, added = not gone, {_divided(name)[1]: name for name in new}
    moved: dict[tuple[str, str], list[str]] = {}
    for name in list(gone):
        folder, below = _divided(name)
        if other := added.pop(below, None):
            moved.setdefault((folder, _divided(other)[0]), []).append(below)
            del gone[name], new[other]
    words = [
        f"{counted(len(names), 'image')} moved from {old} to {to} ({first_of(names, limit=3)})"
        for (old, to), names in moved.items()
    ]
    for found, what in ((gone, "gone"), (new, "new")):
        words += [f"{counted(found.total(), 'image')} {what} ({first_of(sorted(found), limit=3)})"] * bool(found)
    return words, is_only_added


def read_split(file: Path) -> list[list[str]]:
    """Return the name and the part of each image in the split.csv of a run."""
    with open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        return [row for row in csv.reader(lines) if row][1:]


def _divided(name: str) -> tuple[str, str]:
    """Return the class folder of a name, and the name below it."""
    folder, _, below = name.partition("/")
    return folder, below or name
