"""Hold out images of a set without a validation part, and describe the split in a record that checkpoints save."""

import hashlib
import os
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import numpy as np

from configs.schema import Config, Data, Fold
from datasets.image_set import ALL, Table
from datasets.order import shuffled
from datasets.split.parts import (
    FOLDS,
    PARTS,
    hashes_names,
    rows_of_parts,
    warn_of_split_classes,
)
from datasets.targets.one_class import count_classes
from datasets.types import SavedData
from utils.text import counted, warning

SEED = 0  # decides which images are held out
MOST_SEARCHED = 5_000  # images; a larger set is divided without a search for copies, which reads them all
DRAWN = ("hash", "position", FOLDS)  # rules that draw a split; the other rules are "folders" and "none"


def new_record(rule: str, title: str, fraction: float, fold: Fold | None) -> dict:
    """Return the record of a split by a rule of DRAWN. A `fold` overrides `rule` and `fraction`."""
    record = {"rule": rule, "training": title, "validation": title, "fraction": fraction, "seed": SEED}
    if fold:
        return record | {"rule": FOLDS, "fraction": 1 / fold.total, "folds": fold.total, "fold": fold.number}
    return record


def _by_position(image_set: Table, record: dict) -> np.ndarray:
    """Return bool [N]: the images that are held out, drawn from each class by position and seed.

    Each class keeps a training image, and a class with two or more images also holds one out, unless the fraction is 0.
    The folds of a choice, and of exports of 2.2 and earlier, are drawn like this too.
    """
    held_out, start = np.zeros(len(image_set), dtype=bool), 0
    by_class = np.argsort(image_set.targets, kind="stable")
    for target, count in enumerate(count_classes(image_set.targets).tolist()):
        if "folds" in record:
            bounds = record["fold"] / record["folds"], (record["fold"] + 1) / record["folds"]
            first, end = (round(count * bound) for bound in bounds)
        else:
            fraction = record["fraction"]
            first, end = 0, max(min(max(round(count * fraction), 1), count - 1), 0) if fraction else 0
        held_out[by_class[start + shuffled(count, record["seed"], target)[first:end]]] = True
        start += count
    return held_out


def split(config: Config, image_set: Table, saved: SavedData | None) -> tuple[Table, Table]:
    """Return training and validation images of a set without a validation part.

    `image_set.split` has the key `training`, the title of the data. With the rule `position` for published data, a part
    is held out by position; `fraction` replaces DATA.VAL_FRACTION. `saved`: the data record of the resumed checkpoint.
    """
    title, is_published = image_set.split["training"], image_set.split.get("rule") == "position"
    fraction = image_set.split.get("fraction", config.DATA.VAL_FRACTION)
    record = new_record("position" if is_published else "hash", title, fraction, config.DATA.fold)
    if config.DATA.GROUP_BY:
        record["group_by"] = config.DATA.GROUP_BY
    if image_set.copies is not None:
        record["copies"] = True
    if config.DATA.FOLDS or (record["rule"] == "hash" and not fraction):
        from datasets.split.whole import learn_all

        return learn_all(config, image_set, record, saved)
    if saved:
        from datasets.split.by_hash import with_class_folders

        record = with_class_folders(image_set, record, saved)
    return divide(image_set, record, saved)


def validation_facts(image_set: Table) -> dict[str, int | str]:
    """Return facts that identify a validation set in any folder: the number, file names and classes of its images."""
    meanings = image_set.target_names()
    classes = [meanings[target] for target in image_set.targets.tolist()]
    names = [f"{os.path.basename(image_set.name(index))} {name}" for index, name in enumerate(classes)]
    return {
        "num_images": len(image_set),
        "digest": hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogateescape")).hexdigest(),
    }


def how_held_out(val: Table) -> str:
    """Return how the validation images were chosen, or "" if they are a part of their own."""
    record = val.split
    rule = record["rule"]
    if rule not in DRAWN:
        return ""
    how = f"a hash of each {record.get('group_by', 'name')}" if rule == "hash" else "position in each class"
    if rule == FOLDS:
        how = f"drawing equal shares of each {val.meaning.part_noun}"
        how += f", each {record['group_by']} whole" if "group_by" in record else ""
    how += ", copies in one part" if record.get("copies") else ""
    return f"by {how}"


def describe_split(config: Config, val: Table, only_validation: bool) -> list[str]:
    """Return log lines about the images of both parts, or only about the validation images."""
    record = val.split
    rule, validation = record["rule"], record["validation"]
    if rule in DRAWN:
        share = f"DATA.VAL_FRACTION {record['fraction']:g}"
        if rule == "hash":
            share += f", and the lowest of each {val.meaning.part_noun}"
        if "folds" in record:
            share = f"DATA.FOLD {record['fold']}/{record['folds']}"
        share = f"without its class folder, {share}" if hashes_names(record) else share
        validation = f"held out of {validation} {how_held_out(val)} ({share})"
    elif rule == "none":
        validation = f"all of {validation}"
    elif rule == ALL:
        from datasets.split.whole import describe

        validation = describe(config, record)
    end = f"{validation}, {counted(len(val.classes), config.task.noun)}"
    if only_validation:
        return [f"validation images: {end}"]
    lines, data = [f"training images: {record['training']}, validation: {end}"], config.DATA
    if rule != ALL and not data.FOLD and data.VAL_FRACTION not in (Data.VAL_FRACTION, record.get("fraction")):
        lines.append(
            warning(
                f"DATA.VAL_FRACTION {data.VAL_FRACTION:g} has no effect, because {data.DATASET} has its own "
                "validation images"
            )
        )
    return lines


def write_split(file: Path, train: Table, val: Table) -> None:
    """Write split.csv if the split was drawn and the images are files, or if they have folds and names."""
    if val.trains_on_all:
        val = val.take(np.empty(0, np.int64))
    is_of_files = val.split.get("rule") in DRAWN and val.root is not None
    if is_of_files or (val.folds is not None and not val.storage.names_are_numbers):
        from datasets.split.table import write_table

        write_table(file, train, val)


def divide(image_set: Table, record: dict, saved: SavedData | None = None) -> tuple[Table, Table]:
    """Split a set into training and validation images as the record says, in the set's order.

    `saved`: the data record of a run, which keeps the folds of its images.
    """
    folders: Set[bytes] = frozenset()
    folds = None
    if record["rule"] == FOLDS:
        from datasets.split.folds import hold_out_fold

        folds, columns, notes = hold_out_fold(image_set, record, saved)
    elif record["rule"] == "hash":
        from datasets.split.by_hash import class_folders_of, find_rows

        folders, strata = class_folders_of(image_set, record), image_set.meaning.strata(image_set)
        columns, notes = find_rows(strata, record, folders)
        if saved and record.get("copies"):
            from datasets.split.together import keep_parts

            columns = keep_parts(strata, columns, saved)
    else:
        held_out = _by_position(image_set, record)
        columns, notes = rows_of_parts(image_set, held_out), warn_of_split_classes(image_set, held_out)
    if image_set.copies is not None:
        from datasets.split.together import describe_copies

        notes = [*describe_copies(image_set.meaning.strata(image_set)), *notes]
    notes = (*image_set.notes, *notes)
    whole = replace(image_set, folds=folds, split=record, class_folders=folders, notes=notes)
    return tuple(replace(whole.take(columns[f"{part}.row"]), targets=columns[f"{part}.target"]) for part in PARTS)
