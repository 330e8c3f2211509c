"""The images that stay in the same part: those with the same name, in the same group, and copies of each other."""

from collections.abc import Iterator, Sequence, Set

import numpy as np

from datasets.changes import read_split, split_table
from datasets.image_set import Table
from datasets.split.hashes import composed, hashes_of, without_first
from datasets.split.parts import PARTS, rows_of_parts
from datasets.types import SavedData
from utils.text import warning

COPY_OF = "copy_of"  # the column of split.csv with the first of the copies
LARGEST = 0.25  # the share of the held-out images that the copies of one photo may be
LAST = 2**64 - 1  # the highest hash, which only a fraction of 1 holds out


def group_numbers(image_set: Table) -> np.ndarray:
    """Return int64 [N]: the number of each image's group, from 0. Groups that share a photo or a copy are one."""
    columns = [hashes_of(image_set.split_keys(), seed=0)] if image_set.groups is not None else []
    if image_set.copies is not None:
        columns.append(image_set.copies)
    return joined(*columns)


def joined(*columns: np.ndarray) -> np.ndarray:
    """Return int64 [N]: a number for each image. Images that are equal in a column have the same number, directly or by
    other images."""
    numbers = np.arange(len(columns[0]))
    members = [np.unique(column, return_inverse=True)[1] for column in columns]
    before = None
    while before is None or (numbers != before).any():
        before = numbers
        for column in members:
            least = np.full(column.max(initial=-1) + 1, len(numbers))
            np.minimum.at(least, column, numbers)
            numbers = least[column]
    return np.unique(numbers, return_inverse=True)[1]


def share_hashes(image_set: Table, hashes: np.ndarray, record: dict, folders: Set[bytes]) -> np.ndarray:
    """Return the hashes of the images' keys, equal in each group that has copies: the hash of its shortest key.

    Of equally long keys, it is the first in the alphabet. A copy that is added later usually has a longer or a later
    name, so it does not move the other images. A large group stays in training, because few photos would decide the
    scores.
    """
    shared, largest = hashes.copy(), len(image_set)
    if "folds" not in record:
        largest = max(2, LARGEST * record["fraction"] * len(image_set))
    for place, rows in enumerate(_groups_with_copies(image_set, is_cut=False)):
        keys = [key for chunk in image_set.take(rows).split_keys() for key in chunk]
        names = [without_first(folders, composed(key)) for key in keys]
        first = min(range(len(names)), key=lambda number: (len(names[number]), names[number], keys[number]))
        shared[rows] = hashes[rows[first]]
        if len(rows) > largest:
            shared[rows] = LAST - place
    return shared


def keep_parts(image_set: Table, drawn: dict[str, np.ndarray], saved: SavedData) -> dict[str, np.ndarray]:
    """Return the rows and targets of both parts, as split.csv beside the checkpoint lists them.

    Images that it does not list have the part of their copies, or else the part that was drawn. Without copies, hashes
    suffice: a copy that is added under a shorter name would move the others.
    """
    table = split_table(saved)
    if table is None:
        return drawn
    listed = {row[0]: row[1] == PARTS[1] for row in read_split(table)}
    keys = [key.decode(errors="surrogateescape") for chunk in image_set.all_keys() for key in chunk]
    held_out = np.isin(np.arange(len(image_set)), drawn[f"{PARTS[1]}.row"])
    is_listed = np.array([key in listed for key in keys])
    held_out[is_listed] = [listed[key] for key in keys if key in listed]
    if image_set.copies is None:  # they were removed, or this is another folder
        return rows_of_parts(image_set, held_out)
    for rows in _groups_with_copies(image_set, is_cut=False):
        known = rows[is_listed[rows]]
        if len(known):
            held_out[rows[~is_listed[rows]]] = held_out[known[0]]
    return rows_of_parts(image_set, held_out)


def describe_copies(image_set: Table) -> list[str]:
    """Return log lines about the copies of a set that is divided. `image_set`: with the classes that are divided."""
    lines, is_copy = [], _have_copies(image_set)
    whole = [rows[is_copy[rows]] for rows in _groups_with_copies(image_set, is_cut=False)]
    if whole:
        count = sum(len(rows) for rows in whole)
        pair = np.flatnonzero(image_set.copies == image_set.copies[whole[0][0]])[:2].tolist()
        names = " and ".join(image_set.key(row) for row in pair)
        lines.append(f"copies: {count:,} images look the same as another, such as {names}; copies stay in one part")
    for rows in _groups_with_copies(image_set, is_cut=True):
        lines.append(
            warning(
                f"copies: {len(rows):,} images that look the same, such as {image_set.key(int(rows[0]))}, are divided, "
                f"because they are most of all images, or all images of a {image_set.meaning.part_noun}; so the scores "
                "are too good"
            )
        )
    return lines


def _have_copies(image_set: Table) -> np.ndarray:
    """Return bool [N]: whether each image has a copy."""
    copies, counts = np.unique(image_set.copies, return_counts=True)
    return np.isin(image_set.copies, copies[counts > 1])


def _groups_with_copies(image_set: Table, is_cut: bool) -> Iterator[np.ndarray]:
    """Yield the rows of each group with copies: with `is_cut`, of the groups that are divided, otherwise of the others.

    A group is divided between the parts if it has more than half of all images, or all images of a class that has more
    than one image.
    """
    numbers = joined(hashes_of(image_set.split_keys(), seed=0), image_set.copies)
    totals = image_set.count_classes()
    for number in np.unique(numbers[_have_copies(image_set)]).tolist():
        rows = np.flatnonzero(numbers == number)
        has_all = ((totals > 1) & (image_set.count_classes(rows) == totals)).any()
        if is_cut == bool(has_all or 2 * len(rows) > len(image_set)):
            yield rows


def first_copies(parts: Sequence[Table]) -> Iterator[list[str]]:
    """Yield for each part the key of the first copy of each image: "" for the first copy, and without copies."""
    first: dict[int, str] = {}
    for part in parts:
        column = []
        for index, number in enumerate(part.copies.tolist()):
            column.append(first.get(number, ""))
            first.setdefault(number, part.key(index))
        yield column
