"""The images that stay in the same part: those with the same name, in the same group, and copies of each other."""

import numpy as np

from datasets.image_set import ImageSet, Table
from datasets.pixels import Pixels
from datasets.split.by_hash import CopyGroups, draw_for_classes, hashes_of
from datasets.split.listed import listed_copies
from datasets.types import SavedData
from utils.text import counted, warning

NEAR = 0.1  # relative difference of the held-out share from DATA.VAL_FRACTION; a larger one is named
NUM_TRIED = 32  # divisions that are nearest to the fraction by the hashes alone; classes can move groups
LARGEST, MOST_DIGITS = 0.9, 6  # limits of a DATA.VAL_FRACTION that the log suggests


def find_copies(table: Table, pixels: Pixels, saved: SavedData | None, most: int) -> np.ndarray | None:
    """Return int64 [N], equal for copies of each other, or None if there are none, or too many images.

    `saved`: the data record of a run that is resumed or evaluated. Its split.csv lists the copies. Otherwise at most
    `most` images are read.
    """
    copies = listed_copies(table, saved) if saved else None
    if copies is None and len(table) <= most:
        from datasets.identity import search_for_copies

        copies = search_for_copies(ImageSet.of(table, pixels))
    has_copies = copies is not None and len(np.unique(copies)) < len(copies)
    return copies if has_copies else None


def group_numbers(table: Table) -> np.ndarray:
    """Return int64 [N]: the number of each image's group, from 0. Groups that share a photo or a copy are one."""
    columns = [hashes_of(table.split_keys(), seed=0)] if table.groups is not None else []
    if table.copies is not None:
        columns.append(table.copies)
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


def group_copies(table: Table) -> tuple[CopyGroups, list[str]]:
    """Return the rows of each group with copies that stays in one part, and log lines about all copies.

    A group is divided if it has more than half of all images, or all images of a class that has more than one image.
    """
    numbers, totals = joined(hashes_of(table.split_keys(), seed=0), table.copies), table.count_classes()
    copies, counts = np.unique(table.copies, return_counts=True)
    is_copy = np.isin(table.copies, copies[counts > 1])
    whole, lines = [], []
    for number in np.unique(numbers[is_copy]).tolist():
        rows = np.flatnonzero(numbers == number)
        has_a_class = ((totals > 1) & (table.count_classes(rows) == totals)).any()
        if not (has_a_class or 2 * len(rows) > len(table)):
            whole.append(rows)
            continue
        lines.append(
            warning(
                f"copies: {len(rows):,} images that look the same, such as {table.key(int(rows[0]))}, are divided, "
                f"because they are most of all images, or all images of a {table.meaning.part_noun}; so the scores "
                "are too good"
            )
        )
    if whole:
        count = sum(int(is_copy[rows].sum()) for rows in whole)
        first = whole[0][is_copy[whole[0]]][0]
        pair = np.flatnonzero(table.copies == table.copies[first])[:2].tolist()
        names = " and ".join(table.key(row) for row in pair)
        line = f"copies: {count:,} images look the same as another, such as {names}; copies stay in one part"
        lines.insert(0, line)
    return whole, lines


# --- the share of the images that whole groups hold out ---


def describe_share(table: Table, record: dict, hashes: np.ndarray, held_out: np.ndarray) -> list[str]:
    """Return a note if whole groups hold out another share of the images than DATA.VAL_FRACTION.

    The note names the fraction that comes nearest. `hashes`: equal in a group of DATA.GROUP_BY.
    """
    fraction, share = record["fraction"], float(held_out.mean())
    if abs(share - fraction) <= NEAR * fraction:
        return []
    groups = counted(len(np.unique(hashes[held_out])), "whole group")
    note = f"DATA.VAL_FRACTION {fraction:g} holds out {share:.1%} of the images, {groups} of {record['group_by']}"
    ordered, sizes = np.unique(hashes, return_counts=True)
    # The share of the images in no group, in the group with the lowest hash, in the two with the lowest hashes, ...
    shares = np.append(0, sizes.cumsum()[:-1]) / len(hashes)
    # A fraction between two of these bounds holds out such a share.
    bounds = [0.0, *np.minimum(ordered / 2**64, LARGEST).tolist()]
    tried = [(abs(share - fraction), share, fraction)]
    for number in np.argsort(np.abs(shares - fraction), kind="stable")[:NUM_TRIED].tolist():
        if other := shortest_between(*bounds[number : number + 2]):
            reached = float(draw_for_classes(table, {**record, "fraction": other}, hashes).mean())
            tried.append((abs(reached - fraction), reached, other))
    _, reached, nearest = min(tried, key=lambda attempt: attempt[0])
    if nearest == fraction:
        return [f"{note} (DATA.GROUP_BY)"]
    return [f"{note} (DATA.GROUP_BY); DATA.VAL_FRACTION={nearest:g} would hold out {reached:.1%}"]


def shortest_between(low: float, high: float) -> float | None:
    """Return the shortest decimal number above `low` and at most `high`, or None if it is long."""
    tried = ((int(low * 10**digits) + 1) / 10**digits for digits in range(1, MOST_DIGITS + 1))
    return next((number for number in tried if number <= high), None)
