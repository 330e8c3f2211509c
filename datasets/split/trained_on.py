"""Tell the images that an evaluated run held out from the images that it was trained on."""

import filecmp
import math
import os
from dataclasses import replace
from pathlib import Path

from configs.schema import Config
from datasets.fingerprint import data_facts, validation_facts
from datasets.image_set import ALL, Table
from datasets.split import DRAWN, FOLDS, columns_of, divide, split
from datasets.split.by_hash import CLASS_FOLDERS, with_class_folders
from datasets.split.listed import PARTS, keep_listed, read_split, split_table
from datasets.types import SavedData
from utils.changed_facts import changed_facts
from utils.errors import ConfigError
from utils.runs import SIZES
from utils.text import warning

AS_LISTED = (
    "the data have changed since the training; the images are scored that split.csv of the run lists as held out"
)
WITHOUT_LIST = warning(
    "DATA.FOLD: the data have changed since the training, and split.csv, which lists the folds of the run, is not "
    "beside its weights, so images that it was trained on may be scored; restore split.csv, or name other images"
)
MOST_COMPARED = 5000  # images; comparing one takes a millisecond on a network disk


def split_to_evaluate(config: Config, table: Table, saved: SavedData | None) -> Table:
    """Return the images to score of a set without a validation part.

    If a run is evaluated on its own data, score only the images that it held out. Of published data, score the
    images that a new run would hold out. Of other data, score all images.

    `saved`: the data record of the evaluated checkpoint.
    """
    has_record = saved is not None and bool(saved.split)
    val = _held_out_by_run(config, table, saved) if has_record else None
    if val is None and table.split.get("rule") == "position":
        _, val = split(config, table, saved).tables(table)
    if val is not None:
        return val
    table = replace(table, split={"rule": "none", "validation": table.split["training"]})
    warnings = _warn_of_trained_images(table, saved) if has_record else []
    return replace(table, notes=(*table.notes, *warnings))


def _held_out_by_run(config: Config, table: Table, saved: SavedData) -> Table | None:
    """Return the images that the run held out, if this is the run's data or a copy of it, and None for other data.

    If the run's data have changed, the split can differ, because it depends on the labels. Then split.csv has the
    parts.
    """
    record, title, group = saved.split, table.split["training"], config.DATA.GROUP_BY
    if record.get("rule") not in DRAWN:
        return None
    is_same = os.path.realpath(record["training"]) == os.path.realpath(title)
    if is_same and record.get("group_by") != group:
        raise ConfigError(
            f"DATA.GROUP_BY is {group}, but the images of {title} were held out with {record.get('group_by')}; "
            "set DATA.GROUP_BY to the same value"
        )
    record = with_class_folders(table, record, saved) | {"training": title, "validation": title}
    parts = divide(table, record, saved)
    _, val = parts.tables(table)
    is_unchanged = validation_facts(val) == saved.validation
    if not is_same:
        has_other_sizes = any(fact.startswith(SIZES) for fact in changed_facts(saved.facts, data_facts(None, val)))
        return val if is_unchanged and not has_other_sizes else None
    if is_unchanged:
        return val
    if record["rule"] == FOLDS and not table.storage.names_are_numbers:  # `divide` has read the list
        return replace(val, notes=(*val.notes, AS_LISTED if split_table(saved) else WITHOUT_LIST))
    if listed := _listed_parts(saved):
        columns = columns_of(keep_listed(table, parts.columns["val.row"], listed), table.targets)
        _, val = replace(parts, columns=columns, notes=[AS_LISTED], folds=None).tables(table)
    return val


def _listed_parts(saved: SavedData) -> dict[str, str]:
    """Return {name of an image: its part} of the run's split.csv, or {} if it is not next to the checkpoint."""
    listed = read_split(split_table(saved))
    num_held_out = sum(part == PARTS[1] for _, part in listed)
    is_of_run = num_held_out == saved.validation.get("num_images")  # the file may be in the folder of another run
    return dict(listed) if is_of_run else {}


def _warn_of_trained_images(table: Table, saved: SavedData) -> list[str]:
    """Return a warning if evaluated images are also training images: with the same path in the folder and content."""
    training = saved.split["training"]  # the folder or list of the training images, as the run named it
    if os.path.realpath(table.split["validation"]) == os.path.realpath(training):
        return [
            warning(f"DATA.DATA_PATH: the run was trained on {training}, so its scores are too good; name other images")
        ]
    is_list = os.path.isfile(training)
    folder = Path(training).parent if is_list else Path(training)
    if table.root is None or not folder.is_dir():
        return []
    compared = range(0, len(table), math.ceil(len(table) / MOST_COMPARED))
    trained = {name for name, part in _listed_parts(saved).items() if part == PARTS[0]}
    candidates = [index for index in compared if not trained or table.key(index) in trained]
    both = [index for index in candidates if _is_in(folder, table, index, is_list and not trained)]
    if not both:
        return []
    of = f"{len(compared):,} compared images" if len(compared) < len(table) else f"{len(table):,} images"
    return [
        warning(
            f"DATA.DATA_PATH: {len(both):,} of {of} are also in {folder}, such as {table.name(both[0])}; leave "
            "out images that the run was trained on, because they distort the scores"
        )
    ]


def _is_in(folder: Path, table: Table, index: int, only_copies: bool) -> bool:
    """Return whether the folder has an image.

    `only_copies`: not the file itself, which may be there without being listed.
    """
    own, other = table.name(index), folder / table.key(index)
    try:
        return not (only_copies and os.path.samefile(own, other)) and filecmp.cmp(own, other, shallow=False)
    except OSError:  # usually there is no such file
        return False


def holds_out_no_more(here: dict, there: dict) -> bool:
    """Return whether `there` holds out at least the images of `here`, assuming that both describe the same data."""
    if here["rule"] == ALL:
        return not there
    if here["rule"] not in DRAWN:
        names = [Path(record["validation"]).name for record in (here, there) if record]
        return not there or (here["rule"] == there["rule"] and names[0] == names[1])
    keys = {*here, "folds", "fold", "group_by", "copies"} - {"training", "validation", "fraction", CLASS_FOLDERS}
    same = all(there.get(key) == here.get(key) for key in keys)
    return same and (here == there if here["rule"] == "position" else here["fraction"] <= there["fraction"])
