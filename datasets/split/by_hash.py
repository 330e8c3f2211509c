"""Hold out images by a hash of their names, so that new images leave training images in training."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence, Set

import numpy as np

from datasets.image_set import Table
from datasets.split.hashes import HASH_BYTES, composed, hashes_of
from datasets.split.parts import CLASS_FOLDERS, PARTS, hashes_names, rows_of_parts, warn_of_split_classes
from datasets.types import SavedData
from utils.text import first_of, warning

NEAR = 0.1  # relative difference of the held-out share from DATA.VAL_FRACTION; a larger one is named
NUM_NAMED = 10  # maximum number of images that a log line names because their class decided their part

Columns = dict[str, np.ndarray]  # rows and targets of both parts, see rows_of_parts


def find_rows(image_set: Table, record: dict, folders: Set[bytes]) -> tuple[Columns, list[str]]:
    """Return the rows and targets of both parts, and lines for the log. Store them next to the index of a large set."""

    def draw() -> tuple[Columns, list[str]]:
        held_out, notes = hold_out(image_set, record, folders)
        return rows_of_parts(image_set, held_out), notes + warn_of_split_classes(image_set, held_out)

    index = image_set.storage.index
    if not index or not index.path or image_set.rows is not None or image_set.copies is not None:
        return draw()
    from datasets.index import IndexBuilder, open_or_build

    def build(builder: IndexBuilder) -> dict:
        columns, notes = draw()
        for name, values in columns.items():
            builder.add(name, values)
        return {"notes": notes}

    drawn_by = {key: value for key, value in record.items() if key not in ("training", "validation", CLASS_FOLDERS)}
    digest = hashlib.sha256(b"\0".join(sorted(folders))).hexdigest()
    # Each fold has its own file, because several folds may run at the same time.
    fold = f"-{record['fold']}-of-{record['folds']}" if "folds" in record else ""
    types = {f"{part}.{column}": kind for part in PARTS for column, kind in (("row", "<u4"), ("target", "<i4"))}
    path = index.path.with_suffix(f".split{fold}{index.path.suffix}")
    stored = open_or_build([path], types, {"split of": [index.id, drawn_by, digest]}, build)
    return {name: stored.column(name) for name in types}, stored.facts["notes"]


def hold_out(image_set: Table, record: dict, folders: Set[bytes]) -> tuple[np.ndarray, list[str]]:
    """Return bool [N], the images that are held out, and lines that name the images whose class decided their part.

    An image is held out if the hash of its key is below the fraction, or is the lowest of its class. So a training
    image stays in training if images are added: a new image with a lower hash only sends the image that had the lowest
    hash back to training. If a class would lose all its images, the image with the highest hash stays in training; it,
    and the only image of a class, may be held out once there are others. The lines name such images.

    Images with the same name, in the same group of DATA.GROUP_BY, or that are copies, are always in the same part.
    """
    hashes = split_hashes(image_set, record, folders)
    drawn, held_out = is_drawn(hashes, record), _hold_out(image_set, record, hashes)
    notes, their = [], f"their {image_set.meaning.part_noun}"
    for moved, part, why in (
        (drawn & ~held_out, "in training", f"otherwise all images of {their} would be held out"),
        (held_out & ~drawn, "held out", f"otherwise {their} would have no validation image"),
    ):
        rows = np.flatnonzero(moved)
        if len(rows):
            names = first_of([image_set.key(row) for row in rows[:NUM_NAMED].tolist()], total=len(rows))
            notes.append(f"{part}, because {why}: {names}")
    is_far = abs(held_out.mean() - record["fraction"]) > NEAR * record["fraction"]
    if is_far and "group_by" in record and "folds" not in record:
        from datasets.split.nearest_fraction import describe_groups

        notes.append(describe_groups(hashes, held_out, record, lambda other: _hold_out(image_set, other, hashes)))
    return held_out, notes


def _hold_out(image_set: Table, record: dict, hashes: np.ndarray) -> np.ndarray:
    """Return bool [N], the images that are held out by the hashes of their keys."""
    drawn = is_drawn(hashes, record)
    if "folds" in record:
        return drawn
    counts, num_drawn = image_set.count_classes(), image_set.count_classes(drawn)
    kept_whole, lacking = np.flatnonzero((counts > 0) & (num_drawn == counts)), (counts > 1) & (num_drawn == 0)
    held_out, together = drawn, hashes
    if hashes_names(record) and (len(kept_whole) or lacking.any()):  # images of two classes may have the same key
        together = split_hashes(image_set, record)
    if len(kept_whole):
        held_out = drawn & ~np.isin(together, together[image_set.with_any(kept_whole)])
    if record["fraction"] > 0:
        held_out = held_out | _lowest_of_each_class(image_set, hashes, together, held_out, set(kept_whole.tolist()))
    return held_out


def is_drawn(hashes: np.ndarray, record: dict) -> np.ndarray:
    """Return bool [N]: whether each hash is held out, regardless of classes."""
    if "folds" not in record:
        return hashes < int(record["fraction"] * 2 ** (8 * HASH_BYTES))
    total = record["folds"]
    bounds = np.array([int(each / total * 2 ** (8 * HASH_BYTES)) for each in range(1, total)], np.uint64)
    return np.searchsorted(bounds, hashes, side="right") == record["fold"]


def split_hashes(image_set: Table, record: dict, folders: Set[bytes] = frozenset()) -> np.ndarray:
    """Return the uint64 hash of each image that decides its part, equal for copies of each other."""
    hashes = hashes_of(image_set.split_keys(), record["seed"], folders)
    if image_set.copies is None:
        return hashes
    from datasets.split.together import share_hashes

    return share_hashes(image_set, hashes, record, folders)


def _lowest_of_each_class(
    image_set: Table, hashes: np.ndarray, together: np.ndarray, held_out: np.ndarray, kept_whole: Set[int]
) -> np.ndarray:
    """Return bool [N]: for each class without held-out images, the image with the lowest hash that can be held out.

    No image is held out if a class would then lose all its training images. A class in `kept_whole` holds out as many
    images as possible. `together` is equal for images that must be in the same part; it also orders images with
    equal hashes."""
    chosen, counts, num_held_out = np.zeros_like(held_out), image_set.count_classes(), image_set.count_classes(held_out)
    lacking = np.flatnonzero((counts > 1) & (num_held_out == 0))
    if not len(lacking):
        return chosen
    rows = np.flatnonzero(np.isin(together, together[image_set.with_any(lacking)]))
    rows = rows[np.lexsort((together[rows], hashes[rows]))]
    groups: dict[int, list[int]] = {}  # the rows of each group with an image of a lacking class, lowest hash first
    for row, group in zip(rows.tolist(), together[rows].tolist(), strict=True):
        groups.setdefault(group, []).append(row)
    sizes = {group: Counter(_labels(image_set, members)) for group, members in groups.items()}
    groups_of = defaultdict(list)
    for group, size in sizes.items():
        for number in size:
            groups_of[number].append(group)
    left, seen, have_one = (counts - num_held_out).tolist(), set(), set()
    for number in lacking.tolist():
        for group in groups_of[number]:
            # Each group is tried only once: a class that cannot spare it now cannot spare it later.
            if group in seen or (number in have_one and number not in kept_whole):
                continue
            seen.add(group)
            if all(count < left[label] for label, count in sizes[group].items()):
                chosen[groups[group]] = True
                have_one.update(sizes[group])
                for label, count in sizes[group].items():
                    left[label] -= count
    return chosen


def _labels(image_set: Table, rows: list[int]) -> list[int]:
    """Return the class numbers of these images, in any order."""
    targets = image_set.targets[rows].tolist()
    return [number for target in targets for number in image_set.meaning.classes_of(target)]


def class_folders_of(image_set: Table, record: dict) -> Set[bytes]:
    """Return the names of folders that are left out of image keys when the split of this record hashes them.

    In every source, these are folders with the name of a class.
    """
    if not hashes_names(record):
        return set()
    names = image_set.meaning.class_folders(record.get(CLASS_FOLDERS, image_set.classes))
    return {composed(name.encode(errors="surrogateescape")) for name in names}


def warn_of_other_folders(val: Table, former: Sequence[str], record: dict, weights: str) -> list[str]:
    """Warn of validation images that the weights were trained on. `weights`: setting and value, for the message.

    `former`, `record`: the classes and the split of their run. An image's part can change with the classes, because the
    hash of its name leaves out class folders.
    """
    if val.is_listing or not val.class_folders:
        return []
    then = hashes_of(val.split_keys(), record["seed"], class_folders_of(val, {CLASS_FOLDERS: former} | record))
    now = hashes_of(val.split_keys(), record["seed"], val.class_folders)
    exchanged = np.flatnonzero((then != now) & ~is_drawn(then, record)).tolist()
    if not exchanged:
        return []
    changed = first_of(sorted({*former} ^ {*val.classes}))
    return [
        warning(
            f"if {weights} was trained on this data, {len(exchanged):,} of {len(val):,} validation images were "
            f"training images, such as {val.key(exchanged[0])}: the hash of a name leaves out folders that are named "
            f"like a class, and these classes are new or gone: {changed}; divide the data into the parts that "
            "split.csv of that run lists"
        )
    ]


def with_class_folders(image_set: Table, record: dict, saved: SavedData) -> dict:
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
