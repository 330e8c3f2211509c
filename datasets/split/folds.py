"""Folds of a cross-validation: of equal size, by class and group, and the same whichever of them is held out.

If images are added, newly drawn folds would differ. So a run lists its folds in split.csv and keeps them. With
DATA.FOLD a run holds one fold out. With DATA.FOLDS it trains on all images, and further runs hold each fold out.
"""

import os
from collections import Counter
from collections.abc import Sequence

import numpy as np

from configs.schema import Config
from datasets.image_set import ALL, Table
from datasets.split.by_hash import CopyGroups, composed, hashes_of, split_hashes
from datasets.split.listed import names_of, read_split, split_table
from datasets.types import SavedData
from utils.errors import ConfigError
from utils.text import counted

NONE = -1  # the fold of an image that has none yet
PRECISION = 2**40  # of the weight of a class; whole numbers give the same folds on every processor
Shares = tuple[np.ndarray, np.ndarray]  # int64 [classes], int64 [classes]: classes, and how many images have each


def find_folds(
    table: Table, strata: Table, record: dict, saved: SavedData | None, copy_groups: CopyGroups
) -> np.ndarray:
    """Return int32 [N]: the fold of each image. `saved`: the data record of the resumed or evaluated run.

    `strata`: the images with the classes of which each fold gets an equal share.

    The folds of a large set are stored next to its index, for all runs.
    """
    kept, index = _kept_folds(table, record, saved), table.storage.index
    is_stored = index and index.path and table.rows is None and table.copies is None
    if not is_stored or (kept != NONE).any():
        return draw_folds(strata, record, kept, copy_groups)
    from datasets.index import IndexBuilder, open_or_build

    def build(builder: IndexBuilder) -> dict:
        builder.add("fold", draw_folds(strata, record, kept))
        return {}

    path = index.path.with_suffix(f".folds-{record['folds']}{index.path.suffix}")
    made_of = {"folds of": [index.id, record["folds"], record["seed"], record.get("group_by"), strata.classes]}
    return open_or_build([path], {"fold": "<i4"}, made_of, build).column("fold")


def draw_folds(strata: Table, record: dict, kept: np.ndarray, copy_groups: CopyGroups = ()) -> np.ndarray:
    """Return int32 [N]: the fold of each image. `kept`: int32 [N], the folds that images keep, or NONE.

    Copies, images with the same name, and images in the same group of DATA.GROUP_BY are in the same fold. Large groups
    are placed first, then images of rare classes, in the order of the hashes of their names.
    """
    distinct, targets = np.unique(strata.targets, return_inverse=True)
    labels = [tuple(sorted(strata.meaning.classes_of(target))) for target in distinct.tolist()]
    shares = [_shares_of([numbers]) for numbers in labels]
    group_of = np.unique(split_hashes(strata, record, copy_groups=copy_groups), return_inverse=True)[1]
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


def _kept_folds(table: Table, record: dict, saved: SavedData | None) -> np.ndarray:
    """Return int32 [N]: the folds that split.csv beside the checkpoint lists, or NONE for images that are new.

    An image that was moved to the folder of another class keeps its fold, if only one image had its name below that
    folder.
    """
    numbers = {f"{fold}/{record['folds']}": fold for fold in range(record["folds"])}
    listed = {name: numbers[fold] for name, fold in read_split(split_table(saved), "fold") if fold in numbers}
    if not listed:
        return np.full(len(table), NONE, np.int32)
    names = names_of(table)
    kept = np.array([listed.get(name, NONE) for name in names], np.int32)
    new, gone = np.flatnonzero(kept == NONE).tolist(), sorted(listed.keys() - names)
    if new and gone and len(gone) < len(listed):
        classes = table.meaning.numbering.folders([*table.classes, *saved.classes])
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


# --- training on all images ---


def record_of_all(config: Config, record: dict) -> dict:
    """Return the record of a run on all images. `record`: of a drawn split.

    Nothing is held out (DATA.VAL_FRACTION 0), or each image by one of several further runs (DATA.FOLDS). Both parts are
    then the whole set, and no run scores images that it was trained on. Raise ConfigError if a setting needs validation
    images, or does not work with the further runs.
    """
    cause = f"DATA.FOLDS is {config.DATA.FOLDS}" if config.DATA.FOLDS else "DATA.VAL_FRACTION is 0"
    remedy = "leave one of them out"
    for name, value in (("TRAIN.EARLY_STOP", config.TRAIN.EARLY_STOP), ("TRAIN.BUDGET", config.TRAIN.BUDGET)):
        if value:
            raise ConfigError(
                f"{name} is {value}, but {cause}, so no epoch has validation images, which {name} needs; {remedy}, "
                "or set the number of epochs with -epochs"
            )
    if config.DATA.FOLDS and config.DIST.STRATEGY == "fsdp2":
        raise ConfigError(f"DIST.STRATEGY is fsdp2, which {cause} does not support; use ddp, or {remedy}")
    kept = {name: record[name] for name in ("training", "validation", "seed", "group_by", "copies") if name in record}
    folds = {"folds": config.DATA.FOLDS} if config.DATA.FOLDS else {}
    return {"rule": ALL, **kept, **folds}


def refuse_empty_folds(config: Config, folds: np.ndarray) -> None:
    num_filled = len(np.unique(folds))
    if num_filled < config.DATA.FOLDS:
        raise ConfigError(
            f"DATA.FOLDS is {config.DATA.FOLDS}, but {counted(len(folds), 'image')} (copies and groups stay together) "
            f"fill only {counted(num_filled, 'fold')}; lower -folds, or add images"
        )


def describe_all(config: Config, record: dict) -> str:
    """Return how a run on all images is measured, for the log."""
    if "folds" not in record:
        return "none, because DATA.VAL_FRACTION is 0, so nothing is measured"
    groups = f", each {record['group_by']} whole" if "group_by" in record else ""
    runs = counted(record["folds"], "further run")
    return f"all of them, by {runs}, each without 1/{record['folds']} of the images{groups} (DATA.FOLDS)"
