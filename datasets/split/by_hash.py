"""Hold out images by a hash of their names, so that new images leave training images in training."""

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np

from datasets.image_set import Table
from datasets.types import SavedData
from utils.text import first_of, warning

HASH_BYTES = 8
MARK = re.compile(rb"\.moved-[0-9]+(?=\.[^./]+$)")  # in the name of a file that release 1.1.0 moved to a taken name
# Key in the record of a split by hash: the folders that are left out of image keys, if they differ from the classes.
CLASS_FOLDERS = "class_folders"
NUM_NAMED = 10  # maximum number of images that a log line names because their class decided their part
LARGEST = 0.25  # the share of the held-out images that the copies of one photo may be
LAST = 2**64 - 1  # the highest hash, which only a fraction of 1 holds out
COLUMNS = {"train.row": "<u4", "train.target": "<i4", "val.row": "<u4", "val.target": "<i4"}  # that are stored

CopyGroups = Sequence[np.ndarray]  # the rows of images that stay in one part, because some are copies of each other


def hold_out(
    table: Table, record: dict, hashes: np.ndarray, copy_groups: CopyGroups = ()
) -> tuple[np.ndarray, list[str]]:
    """Return bool [N], the images that are held out, and lines that name the images whose class decided their part.

    An image is held out if the hash of its key is below the fraction, or is the lowest of its class. So a training
    image stays in training if images are added: a new image with a lower hash only sends the image that had the lowest
    hash back to training. If a class would lose all its images, the image with the highest hash stays in training; it,
    and the only image of a class, may be held out once there are others. The lines name such images.

    Images with equal `hashes` (split_hashes) are always in the same part: those with the same name, in the same group
    of DATA.GROUP_BY, and copies.
    """
    drawn = is_drawn(hashes, record)
    if "folds" in record:
        return drawn, []
    held_out = draw_for_classes(table, record, hashes, copy_groups)
    notes, noun = [], table.meaning.part_noun
    for moved, change in (
        (drawn & ~held_out, f"in training, because otherwise all images of their {noun} would be held out"),
        (held_out & ~drawn, f"held out, because otherwise their {noun} would have no validation image"),
    ):
        rows = np.flatnonzero(moved)
        if len(rows):
            names = first_of([table.key(row) for row in rows[:NUM_NAMED].tolist()], total=len(rows))
            notes.append(f"{change}: {names}")
    return held_out, notes


def open_or_draw(
    table: Table, record: dict, folders: Set[bytes], draw: Callable[[], tuple[dict[str, np.ndarray], list[str]]]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the columns and notes that `draw` returns. Those of a large set are stored next to its index."""
    index = table.storage.index
    if not index or not index.path or table.rows is not None or table.copies is not None:
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
    path = index.path.with_suffix(f".split{fold}{index.path.suffix}")
    stored = open_or_build([path], COLUMNS, {"split of": [index.id, drawn_by, digest]}, build)
    return {name: stored.column(name) for name in COLUMNS}, stored.facts["notes"]


def is_drawn(hashes: np.ndarray, record: dict) -> np.ndarray:
    """Return bool [N]: whether each hash is held out, regardless of classes."""
    if "folds" not in record:
        return hashes < int(record["fraction"] * 2 ** (8 * HASH_BYTES))
    total = record["folds"]
    bounds = np.array([int(number / total * 2 ** (8 * HASH_BYTES)) for number in range(1, total)], np.uint64)
    return np.searchsorted(bounds, hashes, side="right") == record["fold"]


def draw_for_classes(table: Table, record: dict, hashes: np.ndarray, copy_groups: CopyGroups = ()) -> np.ndarray:
    """Return bool [N], the images that are held out, so that classes have images in both parts as far as possible."""
    held_out = is_drawn(hashes, record)
    counts, num_drawn = table.count_classes(), table.count_classes(held_out)
    is_emptied, is_lacking = (counts > 0) & (num_drawn == counts), (counts > 1) & (num_drawn == 0)
    if not (is_emptied | is_lacking).any():
        return held_out
    groups = hashes  # equal for images that must be in the same part
    if hashes_names(record) and len(np.unique(hashes)) < len(hashes):
        # Images of two classes with the same name, without its class folder, need not be in the same part.
        groups = split_hashes(table, record, frozenset(), copy_groups)
    if is_emptied.any():
        held_out &= ~np.isin(groups, groups[table.with_any(np.flatnonzero(is_emptied))])
    if record["fraction"] > 0:
        held_out |= _lowest_of_classes(table, hashes, groups, held_out, counts, is_emptied)
    return held_out


def _lowest_of_classes(
    table: Table,
    hashes: np.ndarray,
    groups: np.ndarray,
    held_out: np.ndarray,
    counts: np.ndarray,
    takes_all: np.ndarray,
) -> np.ndarray:
    """Return bool [N]: for each class without held-out images, the images with the lowest hash that can be held out.

    No image is held out if a class would then lose all its training images. `counts` are the images of each class.
    Classes in `takes_all` (bool [classes]) hold out as many images as possible. `groups` also orders equal hashes.
    """
    chosen, num_held_out = np.zeros_like(held_out), table.count_classes(held_out)
    lacking = np.flatnonzero((counts > 1) & (num_held_out == 0))
    if not len(lacking):
        return chosen
    rows = np.flatnonzero(np.isin(groups, groups[table.with_any(lacking)]))
    rows = rows[np.lexsort((groups[rows], hashes[rows]))]
    members: dict[int, list[int]] = {}  # the rows of each group with an image of a lacking class, lowest hash first
    for row, group in zip(rows.tolist(), groups[rows].tolist(), strict=True):
        members.setdefault(group, []).append(row)
    sizes, groups_of_class = {}, defaultdict(list)
    for group, images in members.items():
        labels = map(table.meaning.classes_of, table.targets[images].tolist())
        sizes[group] = Counter(number for numbers in labels for number in numbers)
        for number in sizes[group]:
            groups_of_class[number].append(group)
    num_trained, seen, held_out_classes = (counts - num_held_out).tolist(), set(), set()
    for number in lacking.tolist():
        for group in groups_of_class[number]:
            # Each group is tried only once: a class that cannot spare it now cannot spare it later.
            if group in seen or (number in held_out_classes and not takes_all[number]):
                continue
            seen.add(group)
            if all(count < num_trained[label] for label, count in sizes[group].items()):
                chosen[members[group]] = True
                held_out_classes.update(sizes[group])
                for label, count in sizes[group].items():
                    num_trained[label] -= count
    return chosen


# --- the hashes ---


def split_hashes(
    table: Table, record: dict, folders: Set[bytes] = frozenset(), copy_groups: CopyGroups = ()
) -> np.ndarray:
    """Return the uint64 hash of each image that decides its part, equal in each group of copies.

    Such a group has the hash of its shortest key. Of equally long keys, it is the first in the alphabet. A copy that is
    added later usually has a longer or a later name, so it does not move the other images. A large group stays in
    training, because few photos would decide the scores.
    """
    hashes = hashes_of(table.split_keys(), record["seed"], folders)
    largest = len(table)
    if "folds" not in record:
        largest = max(2, LARGEST * record["fraction"] * len(table))
    for place, rows in enumerate(copy_groups):
        keys = [key for chunk in table.take(rows).split_keys() for key in chunk]
        names = [without_first(folders, composed(key)) for key in keys]
        first = min(range(len(names)), key=lambda number: (len(names[number]), names[number], keys[number]))
        hashes[rows] = hashes[rows[first]] if len(rows) <= largest else LAST - place
    return hashes


def hashes_of(keys: Iterable[list[bytes]], seed: int, folders: Set[bytes] = frozenset()) -> np.ndarray:
    """Return a uint64 hash of each key, without the first of its folders that is in `folders`, and without MARK.

    Names are normalized first, because a Mac writes umlauts as two characters.
    """
    with_seed, hashes = hashlib.blake2b(digest_size=HASH_BYTES, key=str(seed).encode()), []

    def digest(name: bytes) -> bytes:
        hashed = with_seed.copy()
        hashed.update(name)
        return hashed.digest()

    for chunk in keys:
        together = b"".join(chunk)
        names = chunk if together.isascii() else [composed(name) for name in chunk]
        names = [MARK.sub(b"", name) for name in names] if b".moved-" in together else names
        names = [without_first(folders, name) for name in names] if folders else names
        hashes.append(np.frombuffer(b"".join(map(digest, names)), dtype=">u8").astype(np.uint64))
    return np.concatenate([*hashes, np.empty(0, np.uint64)])


def without_first(folders: Set[bytes], name: bytes) -> bytes:
    """Return a name without the first of its folders that is in `folders`."""
    first, _, below = name.partition(b"/")
    if first in folders and below:
        return below
    *parents, file = name.split(b"/")
    place = next((place for place, parent in enumerate(parents) if parent in folders), len(parents))
    return b"/".join([*parents[:place], *parents[place + 1 :], file])


def composed(name: bytes) -> bytes:
    text = unicodedata.normalize("NFC", name.decode(errors="surrogateescape"))
    return text.encode(errors="surrogateescape")


# --- class folders, which the hashes leave out ---


def hashes_names(record: dict) -> bool:
    """Return whether a record holds images out by a hash of their names, and not by position or by DATA.GROUP_BY.

    A name is hashed without its class folder, so that an image that is moved to another class stays in its part.
    """
    return record["rule"] == "hash" and "group_by" not in record


def class_folders_of(table: Table, record: dict) -> Set[bytes]:
    """Return the names of folders that are left out of image keys when the split of this record hashes them.

    In every source, these are folders with the name of a class.
    """
    if not hashes_names(record):
        return set()
    names = table.meaning.numbering.folders(record.get(CLASS_FOLDERS, table.classes))
    return {composed(name.encode(errors="surrogateescape")) for name in names}


def with_class_folders(table: Table, record: dict, saved: SavedData) -> dict:
    """Return the record with the class folders of the resumed or evaluated run, if they differ from the classes.

    In a list, the label of an image can change while its folder stays. If a class was renamed, both names are kept.
    """
    if not hashes_names(record) or table.is_listing:
        return record
    then, now = {*saved.split.get(CLASS_FOLDERS, saved.classes)}, {*table.classes}
    if then == now or not saved.classes:
        return record
    new, gone = now - {*saved.classes}, {*saved.classes} - now
    return record | {CLASS_FOLDERS: sorted(then | new if len(new) == len(gone) == 1 else then)}


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
