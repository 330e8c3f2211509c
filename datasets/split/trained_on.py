"""Tell the images that an evaluated run held out from the images that it was trained on."""

import filecmp
import itertools
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.changes import read_split, split_table
from datasets.fingerprint import is_other_data
from datasets.image_set import ALL, Table
from datasets.split import DRAWN, divide, split, validation_facts
from datasets.split.by_hash import with_class_folders
from datasets.split.parts import CLASS_FOLDERS, FOLDS, PARTS
from datasets.types import SavedData
from utils.errors import ConfigError
from utils.text import warning

AS_LISTED = (
    "the data have changed since the training; the images are scored that split.csv of the run lists as held out"
)
WITHOUT_LIST = warning(
    "DATA.FOLD: the data have changed since the training, and split.csv, which lists the folds of the run, is not "
    "beside its weights, so images that it was trained on may be scored; restore split.csv, or name other images"
)
MOST_COMPARED = 5000  # images; comparing one takes a millisecond on a network disk


def split_to_evaluate(config: Config, image_set: Table, saved: SavedData | None) -> tuple[Table | None, Table]:
    """Return the training images (or None) and the images to score of a set without a validation part.

    If a run is evaluated on its own data, score only the images that it held out. Of published data, score the
    images that a new run would hold out. Of other data, score all images.

    `saved`: the data record of the evaluated checkpoint.
    """
    has_record = saved is not None and bool(saved.split)
    if has_record and (parts := _split_of_run(config, image_set, saved)):
        return parts
    if image_set.split.get("rule") == "position":
        return split(config, image_set, saved)
    image_set = replace(image_set, split={"rule": "none", "validation": image_set.split["training"]})
    if has_record:
        notes = (*image_set.notes, *_warn_of_trained_images(image_set, saved))
        image_set = replace(image_set, notes=notes)
    return None, image_set


def _split_of_run(config: Config, image_set: Table, saved: SavedData) -> tuple[Table, Table] | None:
    """Return both parts as the run divided them, if this is the run's data or a copy of it, and None for other data.

    If the run's data have changed, the split can differ, because it depends on the labels. Then split.csv has the
    parts.
    """
    record, title, group = saved.split, image_set.split["training"], config.DATA.GROUP_BY
    if record.get("rule") not in DRAWN:
        return None
    is_same = os.path.realpath(record["training"]) == os.path.realpath(title)
    if is_same and record.get("group_by") != group:
        raise ConfigError(
            f"DATA.GROUP_BY is {group}, but the images of {title} were held out with {record.get('group_by')}; "
            "set DATA.GROUP_BY to the same value"
        )
    record = with_class_folders(image_set, record, saved) | {"training": title, "validation": title}
    parts = divide(image_set, record, saved)
    is_unchanged = validation_facts(parts[1]) == saved.validation
    if is_unchanged and not is_other_data(saved.facts, parts[1]):
        return parts
    has_listed_folds = record["rule"] == FOLDS and not image_set.storage.names_are_numbers
    if is_same and not is_unchanged and has_listed_folds:  # `divide` has read the list
        note = AS_LISTED if split_table(saved) else WITHOUT_LIST
        return parts[0], replace(parts[1], notes=(*parts[1].notes, note))
    if is_same and not is_unchanged and (listed := _listed_parts(saved)):
        return _divide_by_list(image_set, parts, listed)
    return parts if is_same else None


def _listed_parts(saved: SavedData) -> dict[str, str]:
    """Return {name of an image: its part} of the run's split.csv, or {} if it is not next to the checkpoint."""
    table = split_table(saved)
    rows = [row for row in read_split(table) if len(row) > 1] if table else []
    num_held_out = sum(row[1] == PARTS[1] for row in rows)
    is_of_run = num_held_out == saved.validation.get("num_images")  # the file may be in the folder of another run
    return {row[0]: row[1] for row in rows} if is_of_run else {}


def _divide_by_list(image_set: Table, drawn: tuple[Table, Table], listed: dict[str, str]) -> tuple[Table, Table]:
    """Return both parts as listed. An image that is not listed keeps the part that was drawn."""
    train, val = drawn
    rows = np.arange(len(image_set)) if image_set.rows is None else image_set.rows
    held_out = np.isin(rows, val.rows)
    for index, key in enumerate(itertools.chain.from_iterable(image_set.all_keys())):
        if part := listed.get(key.decode(errors="surrogateescape")):
            held_out[index] = part == PARTS[1]
    notes = (*image_set.notes, AS_LISTED)
    whole = replace(image_set, split=val.split, class_folders=val.class_folders, notes=notes)
    return whole.take(np.flatnonzero(~held_out)), whole.take(np.flatnonzero(held_out))


def _warn_of_trained_images(image_set: Table, saved: SavedData) -> list[str]:
    """Return a warning if evaluated images are also training images: with the same path in the folder and content."""
    training = saved.split["training"]  # the folder or list of the training images, as the run named it
    if os.path.realpath(image_set.split["validation"]) == os.path.realpath(training):
        return [
            warning(f"DATA.DATA_PATH: the run was trained on {training}, so its scores are too good; name other images")
        ]
    is_list = os.path.isfile(training)
    folder = Path(training).parent if is_list else Path(training)
    if image_set.root is None or not folder.is_dir():
        return []
    compared = range(0, len(image_set), math.ceil(len(image_set) / MOST_COMPARED))
    trained = {name for name, part in _listed_parts(saved).items() if part == PARTS[0]}
    candidates = [index for index in compared if not trained or image_set.key(index) in trained]
    both = [index for index in candidates if _is_in(folder, image_set, index, is_list and not trained)]
    if not both:
        return []
    of = f"{len(compared):,} compared images" if len(compared) < len(image_set) else f"{len(image_set):,} images"
    return [
        warning(
            f"DATA.DATA_PATH: {len(both):,} of {of} are also in {folder}, such as {image_set.name(both[0])}; leave "
            "out images that the run was trained on, because they distort the scores"
        )
    ]


def _is_in(folder: Path, image_set: Table, index: int, only_copies: bool) -> bool:
    """Return whether the folder has an image.

    `only_copies`: not the file itself, which may be there without being listed.
    """
    own, other = image_set.name(index), folder / image_set.key(index)
    try:
        return not (only_copies and os.path.samefile(own, other)) and filecmp.cmp(own, other, shallow=False)
    except OSError:  # usually there is no such file
        return False


def holds_out_no_more(here: dict, there: dict) -> bool:
    """Return whether `there` holds out at least the images of `here`, assuming that both describe the same data."""
    if here["rule"] == ALL:
        return not there
    if here["rule"] not in DRAWN:
        names = [Path(each["validation"]).name for each in (here, there) if each]
        return not there or (here["rule"] == there["rule"] and names[0] == names[1])
    keys = {*here, "folds", "fold", "group_by", "copies"} - {"training", "validation", "fraction", CLASS_FOLDERS}
    same = all(there.get(key) == here.get(key) for key in keys)
    return same and (here == there if here["rule"] == "position" else here["fraction"] <= there["fraction"])
