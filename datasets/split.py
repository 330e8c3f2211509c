"""The images of a set without a validation part that are held out, and the record of it that a checkpoint keeps."""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path

import numpy as np

from configs.schema import Config, Fold
from datasets.fingerprint import is_other_data
from datasets.index import Index, IndexWriter, Shape, open_or_build
from datasets.shuffle import shuffled
from datasets.types import ImageSet, SavedData, count_classes
from utils.errors import ConfigError
from utils.files import replacing
from utils.text import counted, csv_text, first_of

SEED = 0  # that decides which images are held out; runs of earlier versions could have another
DRAWN = ("hash", "position")  # rules of a split that is drawn here; "folders" and "none" are the data's own
EACH_CLASS = "each_class"  # of a record by hash: each class has validation images; runs of before go on without
# Of a record by hash: the key of an image is its name without the class folder, so that an image that is moved to another
# class stays in its part. Runs of before go on with the whole name, and values of DATA.GROUP_BY are hashed as they are.
KEYS, WITHOUT_CLASS = "keys", "without_class"
CLASS_FOLDERS = (
    "class_folders"  # of a record by hash: these folders do not count, where they are not called as the classes
)
HASH_BYTES = 8
NUM_NAMED = 10  # of the images whose part follows from their class
PARTS, COLUMNS = ("train", "val"), {"row": "<u4", "target": "<i4"}  # of the index in which a split is stored
SHAPE = Shape(
    {f"{part}.{column}": kind for part in PARTS for column, kind in COLUMNS.items()},
    [f"{part}.row {part}.target" for part in PARTS],
    {"notes": [str]},
)


def hold_out(image_set: ImageSet, fraction: float, title: str, fold: Fold | None = None) -> tuple[ImageSet, ImageSet]:
    """Training and validation images by position, for a set to which nothing is ever added."""
    return divide(image_set, new_record("position", title, fraction, fold))


def new_record(rule: str, title: str, fraction: float, fold: Fold | None) -> dict:
    """The record of a split by a rule of DRAWN. A `fold` overrides `fraction`."""
    record = {"rule": rule, "training": title, "validation": title, "fraction": fraction, "seed": SEED}
    record |= {KEYS: WITHOUT_CLASS} if rule == "hash" else {}
    if fold:
        return record | {"fraction": 1 / fold.total, "folds": fold.total, "fold": fold.number}
    return record | ({EACH_CLASS: True} if rule == "hash" else {})


def _by_position(image_set: ImageSet, seed: int, part: Callable[[int], tuple[int, int]]) -> np.ndarray:
    """bool [N]: the images that are held out, which depend on the positions of each class and a seed.

    `part`: the first and the last of so many images, in random order.
    """
    held_out, start = np.zeros(len(image_set), dtype=bool), 0
    by_class = np.argsort(image_set.targets, kind="stable")
    for target, count in enumerate(count_classes(image_set.targets).tolist()):
        first, end = part(count)
        held_out[by_class[start + shuffled(count, seed, target)[first:end]]] = True
        start += count
    return held_out


def _by_fraction(image_set: ImageSet, record: dict, class_folders: Set[bytes]) -> tuple[np.ndarray, list[str]]:
    """bool [N]: of each class the fraction by position; no lines for the log.

    Every class keeps an image for training, and gives one to validation if it has two and the fraction is not 0.
    """

    def share(count: int) -> tuple[int, int]:
        return 0, max(min(max(round(count * record["fraction"]), 1), count - 1), 0) if record["fraction"] else 0

    return _by_position(image_set, record["seed"], share), []


def _by_hash(image_set: ImageSet, record: dict, class_folders: Set[bytes]) -> tuple[np.ndarray, list[str]]:
    """Return bool [N]: the images whose key has a hash below the fraction, and the one with the lowest hash of each class.

    So an image that was trained on stays in training, whatever is added: one with a lower hash only sends the former
    lowest back there. Where all images of a class would be held out, the one with the highest hash stays in training.
    Images with the same name, or of one group of DATA.GROUP_BY, are always in the same part. Also return lines for the
    log, which name the images whose part follows from their class.
    """
    notes, fraction, seed = [], record["fraction"], record["seed"]
    hashes = hashes_of(image_set.split_keys(), seed, class_folders)
    drawn = is_drawn(hashes, record)
    counts, num_drawn = image_set.count_classes(), image_set.count_classes(drawn)
    kept_whole, lacking = np.flatnonzero((counts > 0) & (num_drawn == counts)), (counts > 1) & (num_drawn == 0)
    held_out, together = drawn, hashes
    if KEYS in record and (len(kept_whole) or lacking.any()):  # images of two classes may have the same key
        together = hashes_of(image_set.split_keys(), seed)
    if len(kept_whole):
        held_out = drawn & ~np.isin(together, together[image_set.with_any(kept_whole)])
    if record.get(EACH_CLASS):
        lowest = fraction > 0 and _lowest_of_each_class(image_set, hashes, together, held_out, kept_whole)
        held_out = held_out | lowest
    elif fraction and not held_out.any():  # as before there was the key in a record
        held_out = _lowest_of_each_class(image_set, hashes, together, held_out)
    for moved, part, why in (
        (drawn & ~held_out, "in training", "all images of their class would be held out"),
        (held_out & ~drawn, "held out", "their class would have no validation image"),
    ):
        rows = np.flatnonzero(moved)
        names = first_of([image_set.key(row) for row in rows[:NUM_NAMED].tolist()], total=len(rows))
        notes += [f"{part}, because {why}: {names}"] * bool(len(rows))
    without = np.flatnonzero((counts > 0) & (image_set.count_classes(held_out) == 0))
    if len(without):
        names = first_of([image_set.classes[number] for number in without])
        notes.append(f"warning: classes without validation images, so that nothing is measured of them: {names}")
    return held_out, notes


def is_drawn(hashes: np.ndarray, record: dict) -> np.ndarray:
    """Return bool [N]: the hashes of images that are held out, whatever their classes."""
    if "folds" not in record:
        return hashes < int(record["fraction"] * 2 ** (8 * HASH_BYTES))
    total = record["folds"]
    bounds = np.array([int(each / total * 2 ** (8 * HASH_BYTES)) for each in range(1, total)], np.uint64)
    return np.searchsorted(bounds, hashes, side="right") == record["fold"]


def _by_fold(image_set: ImageSet, record: dict, class_folders: Set[bytes]) -> tuple[np.ndarray, list[str]]:
    """bool [N]: the images of this fold; and lines for the log. Each image is in one fold, whatever a class lacks then.

    Fold 0 holds out what a fraction of 1 / folds does, but for classes of a few images.
    """
    number, total, seed = record["fold"], record["folds"], record["seed"]
    if record["rule"] == "hash":
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
    """Training and validation images of a set without a validation part; in evaluation all its images.

    `saved`: what the checkpoint that is continued or evaluated says. Before its version had a record, images were
    drawn by position. Evaluation of a run on the data that it was trained on scores what that run held out.
    """
    record, title = saved.split if saved else {}, image_set.split["training"]
    if config.START.EVAL:
        if record.get("rule") in DRAWN and (parts := _held_out_then(config, image_set, saved)):
            return parts
        image_set.split = {"rule": "none", "validation": title}
        if record:
            image_set.notes += ("accuracy on images that the run was trained on says nothing: leave those out",)
        elif saved:
            image_set.notes += (
                f"warning: the checkpoint is of a version that did not record its split; if it was trained on {title}, "
                "most of these images are training images",
            )
        return None, image_set
    rule = "position" if saved and record.get("rule", "position") == "position" else "hash"
    drawn = new_record(rule, title, config.DATA.VAL_FRACTION, config.DATA.fold)
    for key in (EACH_CLASS, KEYS) if saved else ():  # a run goes on with the images of its version
        if key not in record:
            drawn.pop(key, None)
    if rule == "hash" and config.DATA.GROUP_BY:
        drawn["group_by"] = config.DATA.GROUP_BY
        drawn.pop(KEYS, None)
    return divide(image_set, _with_class_folders(image_set, drawn, saved) if saved else drawn)


def _held_out_then(config: Config, image_set: ImageSet, saved: SavedData) -> tuple[ImageSet, ImageSet] | None:
    """Both parts as the run divided the data that it was trained on, also where that is a copy; None for other data."""
    record, title, group = saved.split, image_set.split["training"], config.DATA.GROUP_BY
    is_same = os.path.realpath(record["training"]) == os.path.realpath(title)
    if is_same and record.get("group_by") != group:
        raise ConfigError(
            f"DATA.GROUP_BY is {group}, but the images of {title} were held out with {record.get('group_by')}; set it to that"
        )
    record = _with_class_folders(image_set, record, saved)
    parts = divide(image_set, record | {"training": title, "validation": title})
    is_copy = identity(parts[1]) == saved.validation and not is_other_data(saved.facts, parts[1])
    return parts if is_same or is_copy else None


def identity(image_set: ImageSet) -> dict[str, int | str]:
    """The facts that tell one validation set from another: its images' number, file names and classes, wherever they lie."""
    meanings = image_set.target_names()
    classes = [meanings[target] for target in image_set.targets.tolist()]
    names = [f"{os.path.basename(image_set.name(index))} {name}" for index, name in enumerate(classes)]
    return {
        "num_images": len(image_set),
        "digest": hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogateescape")).hexdigest(),
    }


def holds_out_no_more(here: dict, there: dict) -> bool:
    """Whether the images held out by one record are held out by the other too, if both are about the same data."""
    if here["rule"] not in DRAWN:
        names = [Path(each["validation"]).name for each in (here, there) if each]
        return not there or (here["rule"] == there["rule"] and names[0] == names[1])
    keys = {*here, "folds", "fold"} - {"training", "validation", "fraction", CLASS_FOLDERS}
    same = all(there.get(key) == here.get(key) for key in keys)
    return same and (here["fraction"] <= there["fraction"] if here["rule"] == "hash" else here == there)


def warn_of_other_parts(val: ImageSet, saved: SavedData | None) -> list[str]:
    """A warning where a set is scored that is always divided by position, and the run had another part of it."""
    here, there = val.split, saved.split if saved else {}
    keys = ("fraction", "seed", "folds", "fold")
    if here["rule"] != "position" or not there or all(here.get(key) == there.get(key) for key in keys):
        return []
    then, now = (", ".join(f"{key} {each[key]}" for key in keys if key in each) for each in (there, here))
    return [
        f"warning: the run held out another part ({then}) than is scored ({now}), so it was trained on some of these images; "
        "leave -cfg out, or set DATA.FOLD and DATA.VAL_FRACTION as it did"
    ]


def describe_split(config: Config, val: ImageSet) -> str:
    """The line that names the images of both parts, or in evaluation those that are scored."""
    record = val.split
    rule, validation = record["rule"], record["validation"]
    if rule in DRAWN:
        how = f"a hash of each {record.get('group_by', 'name')}" if rule == "hash" else "position in each class"
        how += " without its class folder" * (KEYS in record)
        share = f"DATA.VAL_FRACTION {record['fraction']:g}" + ", and the lowest of each class" * (EACH_CLASS in record)
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
    """split.csv: the part of each image, if the split was drawn and the images are files."""
    if val.split.get("rule") not in DRAWN or val.root is None:
        return
    with replacing(file) as out:
        out.write(b"image,part\n")
        for part, image_set in zip(PARTS, (train, val), strict=True):
            for keys in image_set.all_keys():
                out.write(_csv_rows(keys, part))


def _csv_rows(keys: list[bytes], part: str) -> bytes:
    together = b"".join(keys)
    if not any(each in together for each in b'",\r\n'):  # what csv puts in quotes
        return b"".join(b"%b,%b\n" % (key, part.encode()) for key in keys)
    rows = ((key.decode(errors="surrogateescape"), part) for key in keys)
    return csv_text(rows).encode(errors="surrogateescape")


def divide(image_set: ImageSet, record: dict) -> tuple[ImageSet, ImageSet]:
    """Training and validation images by a record, both in the order of the set. Of an indexed set, that is looked up."""
    class_folders = class_folders_of(image_set, record)

    def build(path: Path | None) -> Index:
        choose = _by_fold if "folds" in record else _by_hash if record["rule"] == "hash" else _by_fraction
        held_out, notes = choose(image_set, record, class_folders)
        writer = IndexWriter(path, SHAPE.columns)
        for part, chosen in zip(PARTS, (~held_out, held_out), strict=True):
            writer.add(f"{part}.row", rows := np.flatnonzero(chosen))
            writer.add(f"{part}.target", image_set.targets[rows])
        return writer.finish({"of": known_by, "notes": notes})

    index, whole = image_set.index, image_set.rows is None
    known_by = [
        index.id if index else "",
        *(record.get(each) for each in ("rule", "fraction", "seed", EACH_CLASS, KEYS)),
    ]
    known_by.append(hashlib.sha256(b"\0".join(sorted(class_folders))).hexdigest())
    ending = "split"
    if "folds" in record:  # each fold has a file, since runs of several folds may go on at once
        known_by += [record["folds"], record["fold"]]
        ending += f"-{record['fold']}-of-{record['folds']}"
    paths = [index.path.with_suffix(f".{ending}{index.path.suffix}")] if index and index.path and whole else []
    limits = {"row": len(image_set), "target": int(image_set.targets.max(initial=0)) + 1}

    def is_of(found: Index) -> bool:
        within = (found.is_below(f"{part}.{name}", limit) for part in PARTS for name, limit in limits.items())
        return found.facts.get("of") == known_by and all(within)

    drawn = open_or_build(paths, SHAPE, is_of, build)
    parts = []
    for name in PARTS:
        part = image_set.take(drawn.column(f"{name}.row"))
        part.targets, part.split = drawn.column(f"{name}.target"), record
        part.class_folders = class_folders
        part.notes += tuple(drawn.facts["notes"])
        parts.append(part)
    return tuple(parts)


def hashes_of(keys: Iterable[list[bytes]], seed: int, class_folders: Set[bytes] = frozenset()) -> np.ndarray:
    """Return uint64 of each key, a name without the first of its folders that is among `class_folders`.

    Names are compared as Unicode does: a Mac writes umlauts as two characters.
    """
    with_seed, found = hashlib.blake2b(digest_size=HASH_BYTES, key=str(seed).encode()), []

    def digest(name: bytes) -> bytes:
        hashed = with_seed.copy()
        hashed.update(name)
        return hashed.digest()

    for chunk in keys:
        names = chunk if b"".join(chunk).isascii() else [_composed(name) for name in chunk]
        names = [_without_first(class_folders, name) for name in names] if class_folders else names
        found.append(np.frombuffer(b"".join(map(digest, names)), dtype=">u8").astype(np.uint64))
    return np.concatenate([*found, np.empty(0, np.uint64)])


def _without_first(class_folders: Set[bytes], name: bytes) -> bytes:
    """Return a name without the first of its folders that is among these."""
    first, _, below = name.partition(b"/")
    if first in class_folders and below:
        return below
    *folders, file = name.split(b"/")
    place = next((place for place, folder in enumerate(folders) if folder in class_folders), len(folders))
    return b"/".join([*folders[:place], *folders[place + 1 :], file])


def class_folders_of(image_set: ImageSet, record: dict) -> Set[bytes]:
    """Return the names of folders that do not count in the keys of this record.

    Whatever the source, a folder that is called as a class is one. Of labels that are numbers none is: folders that
    have nothing to do with classes have numbers too.
    """
    if KEYS not in record or image_set.labels_are_numbers:
        return set()
    names = record.get(CLASS_FOLDERS, image_set.classes)
    return {_composed(name.encode(errors="surrogateescape")) for name in names}


def _with_class_folders(image_set: ImageSet, record: dict, saved: SavedData) -> dict:
    """Return the record of a run that goes on or is evaluated, with its class folders if they are not called as the classes.

    In a list the label of an image can change without its folder. A class that was renamed has two names.
    """
    if KEYS not in record or image_set.is_listing:
        return record
    then, now = {*saved.split.get(CLASS_FOLDERS, saved.classes)}, {*image_set.classes}
    if then == now or not saved.classes:
        return record
    new, gone = now - {*saved.classes}, {*saved.classes} - now
    return record | {CLASS_FOLDERS: sorted(then | new if len(new) == len(gone) == 1 else then)}


def _composed(name: bytes) -> bytes:
    text = unicodedata.normalize("NFC", name.decode(errors="surrogateescape"))
    return text.encode(errors="surrogateescape")


def _lowest_of_each_class(
    image_set: ImageSet,
    hashes: np.ndarray,
    together: np.ndarray,
    held_out: np.ndarray,
    kept_whole: Sequence[int] = (),
) -> np.ndarray:
    """bool [N]: for each class of which no image is held out the one with the lowest hash, where no class loses all that
    it has to train on; of the classes `kept_whole` as many as that allows. `together`: equal for images that stay in the
    same part, and the order of those with equal hashes."""
    counts, num_held_out = image_set.count_classes(), image_set.count_classes(held_out)
    lacking = np.flatnonzero((counts > 1) & (num_held_out == 0))
    if not len(lacking):
        return np.zeros_like(held_out)
    labels, images = image_set.targets, np.arange(len(image_set))
    if sets := image_set.label_sets:
        images = np.repeat(images, np.array([len(each) for each in sets])[labels])
        labels = np.array([number for target in labels.tolist() for number in sets[target]], np.int32)
    # A group is looked at once: what a class cannot lose, it cannot lose later.
    in_order = np.lexsort((together, hashes))
    of_image = np.empty(len(hashes), np.int64)
    of_image[in_order] = np.cumsum(np.diff(together[in_order], prepend=together[in_order[:1]]) != 0)
    num_groups = int(of_image[in_order[-1]]) + 1
    groups = of_image[images]
    starts = [0, *np.cumsum(np.bincount(groups, minlength=num_groups)).tolist()]
    by_group = labels[np.argsort(groups, kind="stable")]
    chosen, left = np.zeros(num_groups, dtype=bool), (counts - num_held_out).tolist()
    seen, have_one, take_more = set(), set(), {*map(int, kept_whole)}
    order = np.lexsort((groups, labels))
    order = order[np.isin(labels[order], lacking)]
    for label, group in zip(labels[order].tolist(), groups[order].tolist(), strict=True):
        if group in seen or (label in have_one and label not in take_more):
            continue
        seen.add(group)
        taken = Counter(by_group[starts[group] : starts[group + 1]].tolist())
        if all(count < left[number] for number, count in taken.items()):
            chosen[group] = True
            have_one.update(taken)
            for number, count in taken.items():
                left[number] -= count
    return chosen[of_image]
