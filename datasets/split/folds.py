"""Folds of a cross-validation: of equal size, by class and group, and the same whichever of them is held out.

If images are added, newly drawn folds would differ. So a run lists its folds in split.csv and keeps them.
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from datasets.changes import read_split, split_table
from datasets.image_set import Table
from datasets.split.by_hash import split_hashes
from datasets.split.hashes import composed, hashes_of
from datasets.split.parts import rows_of_parts, warn_of_split_classes
from datasets.types import SavedData

NONE = -1  # the fold of an image that has none yet
PRECISION = 2**40  # of the weight of a class; whole numbers give the same folds on every processor
Shares = tuple[np.ndarray, np.ndarray]  # int64 [classes], int64 [classes]: classes, and how many images have each


class Division(NamedTuple):
    """The images that a fold holds out."""

    folds: np.ndarray  # int32 [N], the fold of each image
    columns: dict[str, np.ndarray]  # rows and targets of both parts, see rows_of_parts
    notes: list[str]


def hold_out_fold(image_set: Table, record: dict, saved: SavedData | None) -> Division:
    """Return the folds and the parts of the images. `saved`: the data record of the resumed or evaluated run."""
    strata, folds = image_set.meaning.strata(image_set), folds_of(image_set, record, saved)
    held_out = folds == record["fold"]
    return Division(folds, rows_of_parts(strata, held_out), warn_of_split_classes(strata, held_out))


def folds_of(image_set: Table, record: dict, saved: SavedData | None) -> np.ndarray:
    """Return int32 [N]: the fold of each image. `saved`: as in hold_out_fold."""
    strata, kept = image_set.meaning.strata(image_set), _kept_folds(image_set, record, saved)
    return _drawn_folds(strata, record) if (kept == NONE).all() else draw_folds(strata, record, kept)


def draw_folds(strata: Table, record: dict, kept: np.ndarray) -> np.ndarray:
    """Return int32 [N]: the fold of each image. `kept`: int32 [N], the folds that images keep, or NONE.

    Copies, images with the same name, and images in the same group of DATA.GROUP_BY are in the same fold. Large groups
    are placed first, then images of rare classes, in the order of the hashes of their names.
    """
    distinct, targets = np.unique(strata.targets, return_inverse=True)
    labels = [tuple(sorted(strata.meaning.classes_of(target))) for target in distinct.tolist()]
    shares = [_shares_of([numbers]) for numbers in labels]
    group_of = np.unique(split_hashes(strata, record), return_inverse=True)[1]
    sizes, by_group = np.bincount(group_of), np.argsort(group_of, kind="stable")
    ends = np.cumsum(sizes)
    fold_of_group = np.full(len(sizes), NONE, np.int32)
    fold_of_group[group_of[kept != NONE]] = kept[kept != NONE]
    folds = np.where(kept == NONE, fold_of_group[group_of], kept)
    filling = Filling(strata.count_classes(), record["folds"])
    for target, fold in zip(targets[folds != NONE].tolist(), folds[folds != NONE].tolist(), strict=True):
        filling.add(shares[target], 1, fold)

    rarity = _ranks_by_rarity(labels, filling.totals)
    rank_of_group = np.full(len(sizes), len(labels))
    np.minimum.at(rank_of_group, group_of, rarity[targets])
    order = np.lexsort((rank_of_group, -sizes))  # equal ones stay in the order of their hashes
    order = order[fold_of_group[order] == NONE]
    # Groups are placed twice, because the first of them were placed before the others were known.
    for group in [*order.tolist(), *order[sizes[order] > 1].tolist()]:
        images = by_group[ends[group] - sizes[group] : ends[group]]
        first = targets[images[0]]
        share = shares[first] if len(images) == 1 else _shares_of([labels[target] for target in targets[images]])
        if folds[images[0]] != NONE:
            filling.remove(share, len(images), folds[images[0]])
        fold = filling.best_for(share)
        filling.add(share, len(images), fold)
        folds[images] = fold
    return folds


def _shares_of(labels: list[tuple[int, ...]]) -> Shares:
    counts = Counter(number for numbers in labels for number in numbers)
    return np.array([*counts], np.int64), np.array([*counts.values()], np.int64)


def _ranks_by_rarity(labels: list[tuple[int, ...]], totals: np.ndarray) -> np.ndarray:
    """Return a rank for each list of labels. Equal lists have equal ranks, and lists with a rare class the lowest."""
    ordered = sorted(set(labels), key=lambda numbers: (min(totals[[*numbers]], default=0), numbers))
    ranks = {numbers: rank for rank, numbers in enumerate(ordered)}
    return np.array([ranks[numbers] for numbers in labels], np.int64)


class Filling:
    """The images that the folds have while they are filled."""

    def __init__(self, totals: np.ndarray, num_folds: int):
        """`totals`: the number of images of each class in all folds."""
        self.totals = totals
        self._weights = np.maximum(PRECISION // np.maximum(totals, 1) ** 2, 1)
        self._counts = np.zeros((len(totals), num_folds), np.int64)  # images of each class in each fold
        self._sizes = np.zeros(num_folds, np.int64)

    def add(self, shares: Shares, num_images: int, fold: int) -> None:
        classes, numbers = shares
        self._counts[classes, fold] += numbers
        self._sizes[fold] += num_images

    def remove(self, shares: Shares, num_images: int, fold: int) -> None:
        classes, numbers = shares
        self.add((classes, -numbers), -num_images, fold)

    def best_for(self, shares: Shares) -> int:
        """Return the fold with the smallest shares of these classes; of equal ones, the smallest fold.

        So the folds of ungrouped images with one class each differ by at most one image, in each class and in all.
        """
        classes, numbers = shares
        # How much the sum of the squared shares would grow, up to a constant.
        growth = (numbers * self._weights[classes]) @ self._counts[classes]
        best = np.flatnonzero(growth == growth.min())
        return int(best[self._sizes[best].argmin()])


def _drawn_folds(strata: Table, record: dict) -> np.ndarray:
    """Return the folds of a new run. Those of a large set are stored next to its index, for all runs."""
    nothing_kept, index = np.full(len(strata), NONE, np.int32), strata.storage.index
    if not index or not index.path or strata.rows is not None or strata.copies is not None:
        return draw_folds(strata, record, nothing_kept)
    from datasets.index import IndexBuilder, open_or_build

    def build(builder: IndexBuilder) -> dict:
        builder.add("fold", draw_folds(strata, record, nothing_kept))
        return {}

    path = index.path.with_suffix(f".folds-{record['folds']}{index.path.suffix}")
    made_of = {"folds of": [index.id, record["folds"], record["seed"], record.get("group_by"), strata.classes]}
    return open_or_build([path], {"fold": "<i4"}, made_of, build).column("fold")


def _kept_folds(image_set: Table, record: dict, saved: SavedData | None) -> np.ndarray:
    """Return int32 [N]: the folds that split.csv beside the checkpoint lists, or NONE for images that are new.

    An image that was moved to the folder of another class keeps its fold, if only one image had its name below that
    folder.
    """
    kept = np.full(len(image_set), NONE, np.int32)
    table = split_table(saved)
    if table is None:
        return kept
    numbers = {f"{fold}/{record['folds']}": fold for fold in range(record["folds"])}
    listed = {row[0]: numbers[row[2]] for row in read_split(table) if len(row) > 2 and row[2] in numbers}
    names = [key.decode(errors="surrogateescape") for keys in image_set.all_keys() for key in keys]
    kept[:] = [listed.get(name, NONE) for name in names]
    new, gone = np.flatnonzero(kept == NONE).tolist(), sorted(listed.keys() - names)
    if new and gone and len(gone) < len(listed):
        classes = image_set.meaning.class_folders([*image_set.classes, *saved.classes])
        then = _hashes_below(gone, classes, record["seed"])
        now = _hashes_below([names[row] for row in new], classes, record["seed"])
        num_then, num_now, name_then = Counter(then), Counter(now), dict(zip(then, gone, strict=True))
        for row, below in zip(new, now, strict=True):
            if num_now[below] == num_then[below] == 1:
                kept[row] = listed[name_then[below]]
    return kept


def _hashes_below(names: list[str], classes: Sequence[str], seed: int) -> list[int]:
    """Return a hash of each name without the folder of its class."""
    folders = {composed(os.fsencode(name)) for name in classes}
    return hashes_of([[os.fsencode(name) for name in names]], seed, folders).tolist()
