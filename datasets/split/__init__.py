"""Hold out images of a set without a validation part, and describe the split in a record that checkpoints save."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from configs.schema import Config, Data, Fold
from datasets.image_set import ALL, Table
from datasets.order import shuffled
from datasets.targets.one_class import count_classes
from datasets.types import SavedData
from utils.text import counted, first_of, warning

SEED = 0  # decides which images are held out
FOLDS = "folds"  # the rule of DATA.FOLD
DRAWN = ("hash", "position", FOLDS)  # rules that draw a split; the other rules are ALL, "folders" and "none"


@dataclass(frozen=True, eq=False)
class Parts:
    """How a set is divided. Rows count the images of the set, and stay in its order."""

    record: dict  # the origin of both parts, which checkpoints save
    # train.row, val.row (uint32), train.target, val.target (int32); empty: all images are in both parts
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    notes: Sequence[str] = ()
    folds: np.ndarray | None = None  # int32 [N], if folds were drawn
    class_folders: Set[bytes] = frozenset()

    def tables(self, table: Table) -> tuple[Table, Table]:
        """Return the training and the validation images of the set."""
        notes = (*table.notes, *self.notes)
        whole = replace(table, split=self.record, folds=self.folds, class_folders=self.class_folders, notes=notes)
        if not self.columns:
            return whole, whole
        train = replace(whole.take(self.columns["train.row"]), targets=self.columns["train.target"])
        return train, replace(whole.take(self.columns["val.row"]), targets=self.columns["val.target"])


def columns_of(held_out: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows and targets of both parts, see Parts. `held_out`: bool [N]."""
    columns = {}
    for part, chosen in (("train", ~held_out), ("val", held_out)):
        rows = np.flatnonzero(chosen)
        columns[f"{part}.row"], columns[f"{part}.target"] = rows.astype("<u4"), targets[rows].astype("<i4")
    return columns


def new_record(rule: str, title: str, fraction: float, fold: Fold | None) -> dict:
    """Return the record of a split by a rule of DRAWN. A `fold` overrides `rule` and `fraction`."""
    record = {"rule": rule, "training": title, "validation": title, "fraction": fraction, "seed": SEED}
    if fold:
        return record | {"rule": FOLDS, "fraction": 1 / fold.total, "folds": fold.total, "fold": fold.number}
    return record


def split(config: Config, table: Table, saved: SavedData | None) -> Parts:
    """Divide a set without a validation part as the settings say.

    `table.split` has the key `training`, the title of the data. With the rule `position` for published data, a part
    is held out by position; `fraction` replaces DATA.VAL_FRACTION. `saved`: the data record of the resumed checkpoint.
    """
    is_published = table.split.get("rule") == "position"
    fraction = table.split.get("fraction", config.DATA.VAL_FRACTION)
    record = new_record("position" if is_published else "hash", table.split["training"], fraction, config.DATA.fold)
    if config.DATA.GROUP_BY:
        record["group_by"] = config.DATA.GROUP_BY
    if table.copies is not None:
        record["copies"] = True
    if config.DATA.FOLDS or (record["rule"] == "hash" and not fraction):
        from datasets.split.folds import record_of_all, refuse_empty_folds

        parts = divide(table, record_of_all(config, record), saved)
        if config.DATA.FOLDS:
            refuse_empty_folds(config, parts.folds)
        return parts
    if saved:
        from datasets.split.by_hash import with_class_folders

        record = with_class_folders(table, record, saved)
    return divide(table, record, saved)


def divide(table: Table, record: dict, saved: SavedData | None = None) -> Parts:
    """Divide a set as the record says. `saved`: the data record of a run, whose split.csv lists folds and copies."""
    rule, strata = record["rule"], table.meaning.strata(table)
    copy_groups, notes, folds = [], [], None
    if table.copies is not None:
        from datasets.split.together import group_copies

        copy_groups, notes = group_copies(strata)
    if rule in (FOLDS, ALL) and "folds" in record:
        from datasets.split.folds import find_folds

        folds = find_folds(table, strata, record, saved, copy_groups)
    if rule == ALL:
        return Parts(record, folds=folds)
    if rule == "hash":
        parts = _divide_by_hash(table, strata, record, copy_groups)
        if saved and record.get("copies"):
            from datasets.split.listed import keep_listed, read_split, split_table

            listed = dict(read_split(split_table(saved)))
            held_out = keep_listed(table, parts.columns["val.row"], listed, copy_groups)
            parts = replace(parts, columns=columns_of(held_out, table.targets))
        return replace(parts, notes=[*notes, *parts.notes])
    held_out = _by_position(table, record) if folds is None else folds == record["fold"]
    notes = [*notes, *_warn_of_split_classes(strata, held_out)]
    return Parts(record, columns_of(held_out, table.targets), notes, folds)


def _divide_by_hash(table: Table, strata: Table, record: dict, copy_groups: Sequence[np.ndarray]) -> Parts:
    """Hold images out by a hash of their names. The parts of a large set are stored next to its index."""
    from datasets.split.by_hash import class_folders_of, hold_out, open_or_draw, split_hashes

    folders = class_folders_of(table, record)

    def draw() -> tuple[dict[str, np.ndarray], list[str]]:
        hashes = split_hashes(strata, record, folders, copy_groups)
        held_out, notes = hold_out(strata, record, hashes, copy_groups)
        if "group_by" in record and "folds" not in record:
            from datasets.split.together import describe_share

            notes += describe_share(strata, record, hashes, held_out)
        return columns_of(held_out, strata.targets), notes + _warn_of_split_classes(strata, held_out)

    columns, notes = open_or_draw(strata, record, folders, draw)
    return Parts(record, columns, notes, class_folders=folders)


def _by_position(table: Table, record: dict) -> np.ndarray:
    """Return bool [N]: the images that are held out, drawn from each class by position and seed.

    Each class keeps a training image, and a class with two or more images also holds one out, unless the fraction is 0.
    The folds of a choice, and of exports of 2.2 and earlier, are drawn like this too.
    """
    held_out, start = np.zeros(len(table), dtype=bool), 0
    by_class = np.argsort(table.targets, kind="stable")
    for target, count in enumerate(count_classes(table.targets).tolist()):
        if "folds" in record:
            bounds = record["fold"] / record["folds"], (record["fold"] + 1) / record["folds"]
            first, end = round(count * bounds[0]), round(count * bounds[1])
        else:
            fraction = record["fraction"]
            first, end = 0, max(min(max(round(count * fraction), 1), count - 1), 0) if fraction else 0
        held_out[by_class[start + shuffled(count, record["seed"], target)[first:end]]] = True
        start += count
    return held_out


# --- the log ---


def _warn_of_split_classes(strata: Table, held_out: np.ndarray) -> list[str]:
    """Warn of classes whose images a split puts into the same part."""
    counts = strata.count_classes(), strata.count_classes(held_out)
    return warn_of_lacking_classes(strata.classes, counts[0] - counts[1], counts[1], strata.meaning.part_nouns)


def warn_of_lacking_classes(
    classes: list[str], num_trained: np.ndarray, num_validation: np.ndarray, nouns: str = "classes"
) -> list[str]:
    """Warn of classes whose images are all in the same part. The arrays have the number of images of each class."""
    notes = []
    for part, counts in (("training", num_trained), ("validation", num_validation)):
        without = np.flatnonzero((num_trained + num_validation > 0) & (counts == 0))
        if len(without):
            notes.append(warning(f"{nouns} without {part} images: {first_of([classes[each] for each in without])}"))
    return notes


def how_held_out(val: Table) -> str:
    """Return how the validation images were chosen, or "" if they are a part of their own."""
    record = val.split
    match record["rule"]:
        case "hash":
            how = f"by a hash of each {record.get('group_by', 'name')}"
        case "position":
            how = "by position in each class"
        case "folds":
            how = f"by drawing equal shares of each {val.meaning.part_noun}"
            how += f", each {record['group_by']} whole" if "group_by" in record else ""
        case _:
            return ""
    return f"{how}, copies in one part" if record.get("copies") else how


def describe_split(config: Config, val: Table, only_validation: bool) -> list[str]:
    """Return log lines about the images of both parts, or only about the validation images."""
    record, data = val.split, config.DATA
    rule, validation = record["rule"], record["validation"]
    if rule in DRAWN:
        validation = f"held out of {validation} {how_held_out(val)} ({_share(val)})"
    elif rule == "none":
        validation = f"all of {validation}"
    elif rule == ALL:
        from datasets.split.folds import describe_all

        validation = describe_all(config, record)
    end = f"{validation}, {counted(len(val.classes), config.task.noun)}"
    if only_validation:
        return [f"validation images: {end}"]
    lines = [f"training images: {record['training']}, validation: {end}"]
    if rule != ALL and not data.FOLD and data.VAL_FRACTION not in (Data.VAL_FRACTION, record.get("fraction")):
        lines.append(
            warning(
                f"DATA.VAL_FRACTION {data.VAL_FRACTION:g} has no effect, because "
                f"{data.DATASET} has its own validation images"
            )
        )
    return lines


def _share(val: Table) -> str:
    record = val.split
    share = f"DATA.VAL_FRACTION {record['fraction']:g}"
    if "folds" in record:
        share = f"DATA.FOLD {record['fold']}/{record['folds']}"
    elif record["rule"] == "hash":
        share += f", and the lowest of each {val.meaning.part_noun}"
    if record["rule"] == "hash" and "group_by" not in record:
        return f"without its class folder, {share}"
    return share


def write_split(file: Path, train: Table, val: Table) -> None:
    """Write split.csv if the split was drawn and the images are files, or if they have folds and names."""
    if val.trains_on_all:
        val = val.take(np.empty(0, np.int64))
    is_of_files = val.split.get("rule") in DRAWN and val.root is not None
    if is_of_files or (val.folds is not None and not val.storage.names_are_numbers):
        from datasets.split.listed import write_table

        write_table(file, train, val)
