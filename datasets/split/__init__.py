"""Hold out images of a set without a validation part, and describe the split in a record that checkpoints save."""

import hashlib
import os
from collections.abc import Callable, Set
from pathlib import Path

import numpy as np

from configs.schema import Config, Fold
from datasets.fingerprint import is_other_data
from datasets.order import shuffled
from datasets.types import ImageSet, SavedData, count_classes
from utils.errors import ConfigError
from utils.files import replacing
from utils.text import counted, csv_text, first_of

SEED = 0  # decides which images are held out
DRAWN = ("hash", "position")  # rules that draw a split; the other rules are "folders" and "none"
# Key in the record of a split by hash: the folders that are left out of image keys, if they differ from the classes.
CLASS_FOLDERS = "class_folders"
PARTS = ("train", "val")
# {column of a part: its type}, in memory and in the index in which a split is stored
COLUMNS = {"row": "<u4", "target": "<i4"}


def hold_out(image_set: ImageSet, fraction: float, title: str, fold: Fold | None = None) -> tuple[ImageSet, ImageSet]:
    """Return training and validation images, split by position. Use it only for sets that never get new images."""
    return divide(image_set, new_record("position", title, fraction, fold))


def new_record(rule: str, title: str, fraction: float, fold: Fold | None) -> dict:
    """Return the record of a split by a rule of DRAWN. A `fold` overrides `fraction`."""
    record = {"rule": rule, "training": title, "validation": title, "fraction": fraction, "seed": SEED}
    if fold:
        return record | {"fraction": 1 / fold.total, "folds": fold.total, "fold": fold.number}
    return record


def _by_position(image_set: ImageSet, seed: int, part: Callable[[int], tuple[int, int]]) -> np.ndarray:
    """Return bool [N]: the images that are held out, drawn from each class by position and seed.

    `part(count)` returns the start and end of the held-out part of a class with `count` images in random order.
    """
    held_out, start = np.zeros(len(image_set), dtype=bool), 0
    by_class = np.argsort(image_set.targets, kind="stable")
    for target, count in enumerate(count_classes(image_set.targets).tolist()):
        first, end = part(count)
        held_out[by_class[start + shuffled(count, seed, target)[first:end]]] = True
        start += count
    return held_out


def _by_fraction(image_set: ImageSet, record: dict, class_folders: Set[bytes]) -> tuple[np.ndarray, list[str]]:
    """Return bool [N], the images that are held out (a fraction of each class, by position), and an empty list.

    Each class keeps a training image. A class with two or more images also holds one out, unless the fraction is 0.
    """

    def share(count: int) -> tuple[int, int]:
        return 0, max(min(max(round(count * record["fraction"]), 1), count - 1), 0) if record["fraction"] else 0

    return _by_position(image_set, record["seed"], share), []


def _by_fold(image_set: ImageSet, record: dict, class_folders: Set[bytes]) -> tuple[np.ndarray, list[str]]:
    """Return bool [N], the images that this fold holds out, and lines for the log. A class may lack images in one part.

    Fold 0 holds out the same images as a fraction of 1 / folds, except in classes with few images.
    """
    number, total, seed = record["fold"], record["folds"], record["seed"]
    if record["rule"] == "hash":
        from datasets.split.by_hash import hashes_of, is_drawn

        held_out = is_drawn(hashes_of(image_set.split_keys(), seed, class_folders), record)
    else:
        bounds = number / total, (number + 1) / total
        held_out = _by_position(image_set, seed, lambda count: tuple(round(count * share) for share in bounds))
    notes, counts = [], image_set.count_classes()
    for chosen, lack in ((held_out, "validation"), (~held_out, "training")):
        without = np.flatnonzero((counts > 0) & (image_set.count_classes(chosen) == 0))
        if len(without):
            names = first_of([image_set.classes[each] for each in without])
            notes.append(f"warning: classes without {lack} images in fold {number} of {total}: {names}")
    return held_out, notes


def split(config: Config, image_set: ImageSet, saved: SavedData | None) -> tuple[ImageSet | None, ImageSet]:
    """Return training and validation images of a set without a validation part, or None and all images in evaluation.

    `saved`: the data record of the checkpoint that is resumed or evaluated. If a run is evaluated on its own data, only
    the images that it held out are scored.
    """
    title = image_set.split["training"]
    if config.START.EVAL:
        record = saved.split if saved else {}
        if record.get("rule") in DRAWN and (parts := _held_out_then(config, image_set, saved)):
            return parts
        image_set.split = {"rule": "none", "validation": title}
        if record:
            image_set.notes += ("leave out images that the run was trained on, because they distort the accuracy",)
        return None, image_set
    drawn = new_record("hash", title, config.DATA.VAL_FRACTION, config.DATA.fold)
    if config.DATA.GROUP_BY:
        drawn["group_by"] = config.DATA.GROUP_BY
    return divide(image_set, _with_class_folders(image_set, drawn, saved) if saved else drawn)


def _held_out_then(config: Config, image_set: ImageSet, saved: SavedData) -> tuple[ImageSet, ImageSet] | None:
    """Return both parts as the run divided them, if this is the run's data or a copy of it, and None for other data."""
    record, title, group = saved.split, image_set.split["training"], config.DATA.GROUP_BY
    is_same = os.path.realpath(record["training"]) == os.path.realpath(title)
    if is_same and record.get("group_by") != group:
        raise ConfigError(
            f"DATA.GROUP_BY is {group}, but the images of {title} were held out with {record.get('group_by')}; "
            "set DATA.GROUP_BY to the same value"
        )
    record = _with_class_folders(image_set, record, saved)
    parts = divide(image_set, record | {"training": title, "validation": title})
    is_copy = identity(parts[1]) == saved.validation and not is_other_data(saved.facts, parts[1])
    return parts if is_same or is_copy else None


def identity(image_set: ImageSet) -> dict[str, int | str]:
    """Return facts that identify a validation set in any folder: the number, file names and classes of its images."""
    meanings = image_set.target_names()
    classes = [meanings[target] for target in image_set.targets.tolist()]
    names = [f"{os.path.basename(image_set.name(index))} {name}" for index, name in enumerate(classes)]
    return {
        "num_images": len(image_set),
        "digest": hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogateescape")).hexdigest(),
    }


def holds_out_no_more(here: dict, there: dict) -> bool:
    """Return whether `there` holds out at least the images of `here`, assuming that both describe the same data."""
    if here["rule"] not in DRAWN:
        names = [Path(each["validation"]).name for each in (here, there) if each]
        return not there or (here["rule"] == there["rule"] and names[0] == names[1])
    keys = {*here, "folds", "fold", "group_by"} - {"training", "validation", "fraction", CLASS_FOLDERS}
    same = all(there.get(key) == here.get(key) for key in keys)
    return same and (here["fraction"] <= there["fraction"] if here["rule"] == "hash" else here == there)


def warn_of_other_parts(val: ImageSet, saved: SavedData | None) -> list[str]:
    """Warn if a set is divided by position, and the scored part is not the part that the run held out."""
    here, there = val.split, saved.split if saved else {}
    keys = ("fraction", "seed", "folds", "fold")
    if here["rule"] != "position" or not there or all(here.get(key) == there.get(key) for key in keys):
        return []
    then, now = (", ".join(f"{key} {each[key]}" for key in keys if key in each) for each in (there, here))
    return [
        f"warning: the scored part ({now}) is not the part that the run held out ({then}), so the model was "
        "trained on some of these images; leave -cfg out, or set DATA.FOLD and DATA.VAL_FRACTION as in the run"
    ]


def describe_split(config: Config, val: ImageSet) -> str:
    """Return the log line about the images of both parts, or in evaluation about the scored images."""
    record = val.split
    rule, validation = record["rule"], record["validation"]
    if rule in DRAWN:
        how = f"a hash of each {record.get('group_by', 'name')}" if rule == "hash" else "position in each class"
        how += " without its class folder" * hashes_names(record)
        share = f"DATA.VAL_FRACTION {record['fraction']:g}" + ", and the lowest of each class" * (rule == "hash")
        if "folds" in record:
            share = f"DATA.FOLD {record['fold']}/{record['folds']}"
        validation = f"held out of {validation} by {how} ({share})"
    elif rule == "none":
        validation = f"all of {validation}"
    end = f"{validation}, {counted(len(val.classes), 'class')}"
    if config.START.EVAL:
        return f"validation images: {end}"
    return f"training images: {record['training']}, validation: {end}"


def write_split(file: Path, train: ImageSet, val: ImageSet) -> None:
    """Write the part of each image to split.csv, if the split was drawn and the images are files."""
    if val.split.get("rule") not in DRAWN or val.root is None:
        return
    with replacing(file) as out:
        out.write(b"image,part\n")
        for part, image_set in zip(PARTS, (train, val), strict=True):
            for keys in image_set.all_keys():
                out.write(_csv_rows(keys, part))


def _csv_rows(keys: list[bytes], part: str) -> bytes:
    together = b"".join(keys)
    if not any(each in together for each in b'",\r\n'):  # values with these characters need quotes
        return b"".join(b"%b,%b\n" % (key, part.encode()) for key in keys)
    rows = ((key.decode(errors="surrogateescape"), part) for key in keys)
    return csv_text(rows).encode(errors="surrogateescape")


def divide(image_set: ImageSet, record: dict) -> tuple[ImageSet, ImageSet]:
    """Split a set into training and validation images as the record says, in the set's order. Store it next to an index."""
    class_folders = class_folders_of(image_set, record)

    def draw() -> tuple[dict[str, np.ndarray], list[str]]:
        held_out, notes = _choose_rule(record)(image_set, record, class_folders)
        columns = {}
        for part, chosen in zip(PARTS, (~held_out, held_out), strict=True):
            rows = np.flatnonzero(chosen)
            columns[f"{part}.row"] = rows.astype(COLUMNS["row"])
            columns[f"{part}.target"] = image_set.targets[rows].astype(COLUMNS["target"])
        return columns, notes

    if image_set.index and image_set.index.path and image_set.rows is None:
        from datasets.split.stored import look_up_or_store

        types = {f"{part}.{name}": kind for part in PARTS for name, kind in COLUMNS.items()}
        columns, notes = look_up_or_store(image_set, record, class_folders, types, draw)
    else:
        columns, notes = draw()
    parts = []
    for name in PARTS:
        part = image_set.take(columns[f"{name}.row"])
        part.targets, part.split = columns[f"{name}.target"], record
        part.class_folders = class_folders
        part.notes += tuple(notes)
        parts.append(part)
    return tuple(parts)


def _choose_rule(record: dict) -> Callable[[ImageSet, dict, Set[bytes]], tuple[np.ndarray, list[str]]]:
    """Return the function that finds the images held out by a record, with lines for the log."""
    if "folds" in record:
        return _by_fold
    if record["rule"] != "hash":
        return _by_fraction
    from datasets.split.by_hash import by_hash

    return by_hash


def hashes_names(record: dict) -> bool:
    """Return whether a record holds images out by a hash of their names, and not by position or by DATA.GROUP_BY.

    A name is hashed without its class folder, so that an image that is moved to another class stays in its part.
    """
    return record["rule"] == "hash" and "group_by" not in record


def class_folders_of(image_set: ImageSet, record: dict) -> Set[bytes]:
    """Return the names of folders that are left out of image keys when the split of this record hashes them.

    In every source, these are folders with the name of a class. If labels are numbers, no folder is left out, because
    other folders may have numbers as names too.
    """
    if not hashes_names(record) or image_set.labels_are_numbers:
        return set()
    from datasets.split.by_hash import composed

    names = record.get(CLASS_FOLDERS, image_set.classes)
    return {composed(name.encode(errors="surrogateescape")) for name in names}


def _with_class_folders(image_set: ImageSet, record: dict, saved: SavedData) -> dict:
    """Return the record with the class folders of the resumed or evaluated run, if they differ from the classes.

    In a list, the label of an image can change while its folder stays. If a class was renamed, both names are kept.
    """
    if not hashes_names(record) or image_set.is_listing:
        return record
    then, now = {*saved.split.get(CLASS_FOLDERS, saved.classes)}, {*image_set.classes}
    if then == now or not saved.classes:
        return record
    new, gone = now - {*saved.classes}, {*saved.classes} - now
    return record | {CLASS_FOLDERS: sorted(then | new if len(new) == len(gone) == 1 else then)}
