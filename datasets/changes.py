"""How images differ from those of a run, by its split.csv."""

import csv
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from datasets.image_set import ImageSet
from datasets.types import SavedData
from utils.text import counted, first_of

MOST_LISTED = 2_000_000  # with more images than this, split.csv is not compared


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
        return ["the same images in another order"] if then != now else [], False
    is_only_added, moved = not gone, {}
    lost, added = _alone_below(gone), _alone_below(new)
    for below in [below for below in lost if below in added]:
        name, other = lost[below], added[below]
        moved.setdefault((_divided(name)[0], _divided(other)[0]), []).append(below)
        del gone[name], new[other]
    changes = [
        f"{counted(len(names), 'image')} moved from {old} to {to} ({first_of(names, limit=3)})"
        for (old, to), names in moved.items()
    ]
    for images, what in ((gone, "gone"), (new, "new")):
        if images:
            changes.append(f"{counted(images.total(), 'image')} {what} ({first_of(sorted(images), limit=3)})")
    return changes, is_only_added


def split_table(saved: SavedData | None) -> Path | None:
    """Return the split.csv next to the checkpoint, or None if it is missing or there is no checkpoint."""
    file = saved and saved.file and saved.file.with_name("split.csv")
    return file if file and file.is_file() else None


def read_split(file: Path) -> list[list[str]]:
    """Return the name and the part of each image in the split.csv of a run, and its fold if there are folds."""
    with open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        return [row for row in csv.reader(lines) if row][1:]


def _alone_below(names: Iterable[str]) -> dict[str, str]:
    """Return {name below its class folder: name} for the names of which no other has the same name below its folder."""
    places = [(_divided(name)[1], name) for name in names]
    counts = Counter(below for below, _ in places)
    return {below: name for below, name in places if counts[below] == 1}


def _divided(name: str) -> tuple[str, str]:
    """Return the class folder of a name, and the name below it."""
    folder, _, below = name.partition("/")
    return folder, below or name
