"""Hold out images by a hash of their names, so that new images never move a training image to validation."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence, Set

import numpy as np

from datasets.split import CLASS_FOLDERS, class_folders_of, hashes_names
from datasets.types import ImageSet
from utils.text import first_of

HASH_BYTES = 8
NUM_NAMED = 10  # maximum number of images that a log line names because their class decided their part
MARK = re.compile(rb"\.moved-[0-9]+(?=\.[^./]+$)")  # in the name of a file that scripts/labels.py moved to a taken name


def by_hash(image_set: ImageSet, record: dict, class_folders: Set[bytes]) -> tuple[np.ndarray, list[str]]:
    """Return bool [N], the images that are held out, and lines that name the images whose class decided their part.

    An image is held out if the hash of its key is below the fraction, or is the lowest of its class. So a training
    image stays in training if images are added: a new image with a lower hash only sends the image that had the lowest
    hash back to training. If a class would lose all its images, the image with the highest hash stays in training.

    Images with the same name, or in the same group of DATA.GROUP_BY, are always in the same part.
    """
    notes, fraction, seed = [], record["fraction"], record["seed"]
    hashes = hashes_of(image_set.split_keys(), seed, class_folders)
    drawn = is_drawn(hashes, record)
    counts, num_drawn = image_set.count_classes(), image_set.count_classes(drawn)
    kept_whole, lacking = np.flatnonzero((counts > 0) & (num_drawn == counts)), (counts > 1) & (num_drawn == 0)
    held_out, together = drawn, hashes
    if hashes_names(record) and (len(kept_whole) or lacking.any()):  # images of two classes may have the same key
        together = hashes_of(image_set.split_keys(), seed)
    if len(kept_whole):
        held_out = drawn & ~np.isin(together, together[image_set.with_any(kept_whole)])
    if fraction > 0:
        held_out = held_out | _lowest_of_each_class(image_set, hashes, together, held_out, kept_whole)
    for moved, part, why in (
        (drawn & ~held_out, "in training", "otherwise all images of their class would be held out"),
        (held_out & ~drawn, "held out", "otherwise their class would have no validation image"),
    ):
        rows = np.flatnonzero(moved)
        names = first_of([image_set.key(row) for row in rows[:NUM_NAMED].tolist()], total=len(rows))
        notes += [f"{part}, because {why}: {names}"] * bool(len(rows))
    without = np.flatnonzero((counts > 0) & (image_set.count_classes(held_out) == 0))
    if len(without):
        names = first_of([image_set.classes[number] for number in without])
        notes.append(f"warning: classes without validation images, so their accuracy is not measured: {names}")
    return held_out, notes


def is_drawn(hashes: np.ndarray, record: dict) -> np.ndarray:
    """Return bool [N]: whether each hash is held out, regardless of classes."""
    if "folds" not in record:
        return hashes < int(record["fraction"] * 2 ** (8 * HASH_BYTES))
    total = record["folds"]
    bounds = np.array([int(each / total * 2 ** (8 * HASH_BYTES)) for each in range(1, total)], np.uint64)
    return np.searchsorted(bounds, hashes, side="right") == record["fold"]


def hashes_of(keys: Iterable[list[bytes]], seed: int, class_folders: Set[bytes] = frozenset()) -> np.ndarray:
    """Return a uint64 hash of each key, without the first of its folders that is in `class_folders`, and without MARK.

    Names are normalized first, because a Mac writes umlauts as two characters.
    """
    with_seed, found = hashlib.blake2b(digest_size=HASH_BYTES, key=str(seed).encode()), []

    def digest(name: bytes) -> bytes:
        hashed = with_seed.copy()
        hashed.update(name)
        return hashed.digest()

    for chunk in keys:
        together = b"".join(chunk)
        names = chunk if together.isascii() else [composed(name) for name in chunk]
        names = [without_mark(name) for name in names] if b".moved-" in together else names
        names = [_without_first(class_folders, name) for name in names] if class_folders else names
        found.append(np.frombuffer(b"".join(map(digest, names)), dtype=">u8").astype(np.uint64))
    return np.concatenate([*found, np.empty(0, np.uint64)])


def without_mark(name: bytes) -> bytes:
    """Return a name as it was before scripts/labels.py moved the file to a taken name: without .moved-2 in a.moved-2.jpg."""
    return MARK.sub(b"", name)


def _without_first(class_folders: Set[bytes], name: bytes) -> bytes:
    """Return a name without the first of its folders that is in `class_folders`."""
    first, _, below = name.partition(b"/")
    if first in class_folders and below:
        return below
    *folders, file = name.split(b"/")
    place = next((place for place, folder in enumerate(folders) if folder in class_folders), len(folders))
    return b"/".join([*folders[:place], *folders[place + 1 :], file])


def composed(name: bytes) -> bytes:
    text = unicodedata.normalize("NFC", name.decode(errors="surrogateescape"))
    return text.encode(errors="surrogateescape")


def _lowest_of_each_class(
    image_set: ImageSet,
    hashes: np.ndarray,
    together: np.ndarray,
    held_out: np.ndarray,
    kept_whole: Sequence[int] = (),
) -> np.ndarray:
    """Return bool [N]: for each class without held-out images, the image with the lowest hash that can be held out.

    No image is held out if a class would then lose all its training images. A class in `kept_whole` holds out as many
    images as possible. `together` is equal for images that must be in the same part; it also orders images with
    equal hashes."""
    counts, num_held_out = image_set.count_classes(), image_set.count_classes(held_out)
    lacking = np.flatnonzero((counts > 1) & (num_held_out == 0))
    if not len(lacking):
        return np.zeros_like(held_out)
    labels, images = image_set.targets, np.arange(len(image_set))
    if sets := image_set.label_sets:
        images = np.repeat(images, np.array([len(each) for each in sets])[labels])
        labels = np.array([number for target in labels.tolist() for number in sets[target]], np.int32)
    # Each group is tried only once: a class that cannot spare it now cannot spare it later.
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


# --- images that moved to the other part with their class ---


def trained_by_other_folders(val: ImageSet, former: Sequence[str], record: dict) -> np.ndarray:
    """Return the indices of validation images that were training images in a run with this record and the classes
    `former`. An image's part can change with the classes, because the hash of its name leaves out class folders."""
    if val.is_listing or not val.class_folders:
        return np.zeros(0, np.int64)
    seed = record["seed"]
    then = hashes_of(val.split_keys(), seed, class_folders_of(val, {CLASS_FOLDERS: former} | record))
    now = hashes_of(val.split_keys(), seed, val.class_folders)
    return np.flatnonzero((then != now) & ~is_drawn(then, record))


def warn_of_other_folders(val: ImageSet, former: Sequence[str], record: dict, weights: str) -> list[str]:
    """Warn of validation images that the weights were trained on. `weights`: setting and value, for the message."""
    found = trained_by_other_folders(val, former, record).tolist()
    if not found:
        return []
    changed = first_of(sorted({*former} ^ {*val.classes}))
    return [
        f"warning: if {weights} was trained on this data, {len(found):,} of {len(val):,} validation images were "
        f"training images, such as {val.key(found[0])}: the hash of a name leaves out folders that are named like a "
        f"class, and these classes are new or gone: {changed}; divide the data into the parts that "
        "split.csv of that run lists"
    ]
