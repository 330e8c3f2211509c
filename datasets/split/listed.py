"""split.csv of a run: the part of each image, its fold if there are folds, and its first copy if there are copies."""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from datasets.image_set import ImageSet, Table
from datasets.types import SavedData
from utils.files import replacing
from utils.text import counted, csv_text, first_of

PARTS = ("train", "val")
COPY_OF = "copy_of"
MOST_COMPARED = 2_000_000  # with more images than this, split.csv is not compared


def write_table(file: Path, train: Table, val: Table) -> None:
    has_folds, has_copies = val.folds is not None, bool(val.split.get("copies"))
    header = ["image", "part", *(["fold"] if has_folds else []), *([COPY_OF] if has_copies else [])]
    first_copies: dict[int, str] = {}
    with replacing(file) as out:
        out.write(f"{','.join(header)}\n".encode())
        for part, table in zip(PARTS, (train, val), strict=True):
            columns, start = [], 0
            if has_folds:
                columns.append([f"{fold}/{val.split['folds']}" for fold in table.folds.tolist()])
            if has_copies:
                columns.append(_first_copies(table, first_copies))
            for keys in table.all_keys():
                out.write(_rows(keys, part, [column[start : start + len(keys)] for column in columns]))
                start += len(keys)


def _first_copies(table: Table, first: dict[int, str]) -> list[str]:
    """Return the key of the first copy of each image, or "" for the first copy. `first`: {number of copies: key}."""
    column = []
    for index, number in enumerate(table.copies.tolist()):
        column.append(first.get(number, ""))
        first.setdefault(number, table.key(index))
    return column


def _rows(keys: list[bytes], part: str, columns: list[list[str]]) -> bytes:
    """Return the rows of images. `columns`: the values after the part, for each column."""
    together = b"".join(keys)
    if not columns and not any(each in together for each in b'",\r\n'):  # values with these characters need quotes
        return b"".join(b"%b,%b\n" % (key, part.encode()) for key in keys)
    names = (key.decode(errors="surrogateescape") for key in keys)
    rows = zip(names, [part] * len(keys), *columns, strict=True)
    return csv_text(rows).encode(errors="surrogateescape")


# --- what a run has listed ---


def split_table(saved: SavedData | None) -> Path | None:
    """Return the split.csv next to the checkpoint, or None if it is missing or there is no checkpoint."""
    file = saved and saved.file and saved.file.with_name("split.csv")
    return file if file and file.is_file() else None


def read_split(file: Path | None, column: str = "part") -> list[tuple[str, str]]:
    """Return the name of each image in a split.csv, and its value in a column; [] without the file or the column."""
    if file is None:
        return []
    with open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        rows = csv.DictReader(lines)
        if column not in (rows.fieldnames or ()):
            return []
        return [(row["image"], row[column]) for row in rows]


def names_of(table: Table) -> list[str]:
    """Return the names of all images as split.csv has them."""
    return [key.decode(errors="surrogateescape") for keys in table.all_keys() for key in keys]


def listed_copies(table: Table, saved: SavedData) -> np.ndarray | None:
    """Return the copies that split.csv beside the checkpoint lists, or None if it does not list all images."""
    listed, names = dict(read_split(split_table(saved), COPY_OF)), names_of(table)
    if any(listed.get(name) is None for name in names):
        return None
    return np.unique([listed[name] or name for name in names], return_inverse=True)[1]


def keep_listed(
    table: Table, val_rows: np.ndarray, listed: Mapping[str, str], copy_groups: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """Return bool [N]: the images that are held out if each has the part in `listed`.

    Images that are not listed have the part of their copies, or else stay where `val_rows` has them. Without copies,
    hashes suffice: a copy that is added under a shorter name would move the others.
    """
    parts = [listed.get(name) for name in names_of(table)]
    is_listed = np.array([part in PARTS for part in parts], bool)
    held_out = np.isin(np.arange(len(table)), val_rows)
    held_out[is_listed] = [part == PARTS[1] for part in parts if part in PARTS]
    for rows in copy_groups:
        known = rows[is_listed[rows]]
        if len(known):
            held_out[rows[~is_listed[rows]]] = held_out[known[0]]
    return held_out


def describe_changed_images(file: Path, train: ImageSet, val: ImageSet) -> tuple[list[str], bool]:
    """Describe how the images differ from a run's split.csv, and return whether images were only added.

    The description is empty if the file is missing, or if there are too many images to compare.
    """
    if not file.is_file() or len(train) + len(val) > MOST_COMPARED:
        return [], False
    then, now = [name for name, _ in read_split(file)], [*names_of(train), *names_of(val)]
    gone, new = Counter(then) - Counter(now), Counter(now) - Counter(then)
    if not (gone or new):
        return ["the same images in another order"] if then != now else [], False
    is_only_added, moved = not gone, {}
    lost, added = _alone_below(gone), _alone_below(new)
    for below in [below for below in lost if below in added]:
        name, other = lost[below], added[below]
        moved.setdefault((_class_folder(name), _class_folder(other)), []).append(below)
        del gone[name], new[other]
    changes = [
        f"{counted(len(names), 'image')} moved from {old} to {to} ({first_of(names, limit=3)})"
        for (old, to), names in moved.items()
    ]
    for images, change in ((gone, "gone"), (new, "new")):
        if images:
            changes.append(f"{counted(images.total(), 'image')} {change} ({first_of(sorted(images), limit=3)})")
    return changes, is_only_added


def _alone_below(names: Iterable[str]) -> dict[str, str]:
    """Return {name below its class folder: name} for the names of which no other has the same name below its folder."""
    places = [(name.partition("/")[2] or name, name) for name in names]
    counts = Counter(below for below, _ in places)
    return {below: name for below, name in places if counts[below] == 1}


def _class_folder(name: str) -> str:
    return name.partition("/")[0]
