"""The images of a set without a validation part that are held out, and the record of it that a checkpoint keeps."""

import csv
import functools
import hashlib
import io
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from configs.schema import Config, Fold
from datasets.index import Index, IndexWriter, open_or_build
from datasets.shuffle import shuffled
from datasets.types import ImageSet, SavedData, count_classes
from utils.errors import ConfigError
from utils.files import replacing
from utils.text import counted, first_of

SEED = 0  # that decides which images are held out; runs of earlier versions could have another
DRAWN = ("hash", "position")  # rules of a split that is drawn here; "folders" and "none" are the data's own
HASH_BYTES = 8
PARTS, COLUMNS = ("train", "val"), {"row": "<u4", "target": "<i4"}  # of the index in which a split is stored


def hold_out(
    image_set: ImageSet, fraction: float, title: str, fold: Fold | None = None, rule: str = "position", seed: int = SEED
) -> tuple[ImageSet, ImageSet]:
    """Training and validation images by a rule of DRAWN, both in the order of the set. A `fold` overrides `fraction`."""
    record = {"rule": rule, "training": title, "validation": title, "fraction": fraction, "seed": seed}
    if fold:
        record |= {"fraction": 1 / fold.total, "folds": fold.total, "fold": fold.number}
        return _parts(image_set, record, lambda: _by_fold(image_set, rule, seed, fold))
    if rule == "hash":
        return _parts(image_set, record, lambda: _by_hash(image_set, fraction, seed))
    return _parts(image_set, record, lambda: (_by_position(image_set, seed, functools.partial(_share, fraction)), []))


def _by_position(image_set: ImageSet, seed: int, part: Callable[[int], tuple[int, int]]) -> np.ndarray:
    """bool [N]: the images that are held out, which depend on the positions of each class and a seed.

    For sets to which nothing is ever added. `part`: the first and the last of so many images, in random order.
    """
    held_out, start = np.zeros(len(image_set), dtype=bool), 0
    by_class = np.argsort(image_set.targets, kind="stable")
    for target, count in enumerate(count_classes(image_set.targets).tolist()):
        first, end = part(count)
        held_out[by_class[start + shuffled(count, seed, target)[first:end]]] = True
        start += count
    return held_out


def _share(fraction: float, count: int) -> tuple[int, int]:
    """Every class keeps an image for training, and gives one to validation if it has two and `fraction` is not 0."""
    return 0, max(min(max(round(count * fraction), 1), count - 1), 0) if fraction else 0


def _by_hash(image_set: ImageSet, fraction: float, seed: int) -> tuple[np.ndarray, list[str]]:
    """bool [N]: the images that are held out, by a hash of each name, so that more images or classes never move one.

    Only where that would leave a class nothing to train on, or no image at all to validate on, is it overruled. Images
    with the same key, such as those of one group of DATA.GROUP_BY, are always in the same part. Also lines for the log.
    """
    notes = []
    hashes = _hashes(image_set.split_keys(), seed)
    held_out = hashes < int(fraction * 2 ** (8 * HASH_BYTES))
    counts = image_set.count_classes()
    kept_whole = np.flatnonzero((counts > 0) & (image_set.count_classes(held_out) == counts))
    if len(kept_whole):
        held_out &= ~np.isin(hashes, hashes[image_set.with_any(kept_whole)])
        names = first_of([image_set.classes[number] for number in kept_whole])
        notes.append(f"all images of these classes would be held out, so they stay in training: {names}")
    if fraction and not held_out.any():
        held_out = _lowest_of_each_class(image_set, hashes)
        notes.append("the hash holds out no image, so those with the lowest hash of each class are held out")
    without = np.flatnonzero((counts > 0) & (image_set.count_classes(held_out) == 0))
    if len(without):
        names = first_of([image_set.classes[number] for number in without])
        notes.append(f"classes without validation images: {names}; raise DATA.VAL_FRACTION ({fraction:g}) for some")
    return held_out, notes


def _by_fold(image_set: ImageSet, rule: str, seed: int, fold: Fold) -> tuple[np.ndarray, list[str]]:
    """bool [N]: the images of this fold; and lines for the log. Each image is in one fold, whatever a class lacks then.

    Fold 0 holds out what a fraction of 1 / folds does, but for classes of a few images.
    """
    shares = [number / fold.total for number in range(fold.total + 1)]
    if rule == "hash":
        bounds = np.array([int(share * 2 ** (8 * HASH_BYTES)) for share in shares[1:-1]], np.uint64)
        held_out = np.searchsorted(bounds, _hashes(image_set.split_keys(), seed), side="right") == fold.number
    else:
        bounds = shares[fold.number : fold.number + 2]
        held_out = _by_position(image_set, seed, lambda count: tuple(round(count * share) for share in bounds))
    notes, counts = [], image_set.count_classes()
    for chosen, lack in ((held_out, "validation"), (~held_out, "training")):
        without = np.flatnonzero((counts > 0) & (image_set.count_classes(chosen) == 0))
        if len(without):
            names = first_of([image_set.classes[number] for number in without])
            notes.append(f"warning: classes without {lack} images in fold {fold.number} of {fold.total}: {names}")
    return held_out, notes


def split(config: Config, image_set: ImageSet, saved: SavedData | None) -> tuple[ImageSet | None, ImageSet]:
    """Training and validation images of a set without a validation part; in evaluation all its images.

    `saved`: what the checkpoint that is continued or evaluated says. Before its version had a record, images were
    drawn by position. Evaluation of a run on the data that it was trained on scores what that run held out.
    """
    data, record = config.DATA, saved.split if saved else {}
    title, drawn = image_set.split["training"], (data.VAL_FRACTION, SEED, data.fold)
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
    rule = "hash" if saved is None else record.get("rule", "position")
    return _draw(config, image_set, "position" if rule == "position" else "hash", *drawn)


def _draw(
    config: Config, image_set: ImageSet, rule: str, fraction: float, seed: int, fold: Fold | None
) -> tuple[ImageSet, ImageSet]:
    train, val = hold_out(image_set, fraction, image_set.split["training"], fold, rule, seed)
    if rule == "hash" and config.DATA.GROUP_BY:
        val.split["group_by"] = config.DATA.GROUP_BY  # the record is of both parts
    return train, val


def _held_out_then(config: Config, image_set: ImageSet, saved: SavedData) -> tuple[ImageSet, ImageSet] | None:
    """Both parts as the run divided the data that it was trained on, also where that is a copy; None for other data."""
    record, title = saved.split, image_set.split["training"]
    fold = Fold(record["fold"], record["folds"]) if "folds" in record else None
    parts = _draw(config, image_set, record["rule"], record["fraction"], record["seed"], fold)
    if os.path.realpath(record["training"]) != os.path.realpath(title):
        return parts if identity(parts[1]) == saved.validation else None
    if record.get("group_by") != config.DATA.GROUP_BY:
        raise ConfigError(
            f"DATA.GROUP_BY is {config.DATA.GROUP_BY}, but the images of {title} were held out with "
            f"{record.get('group_by')}; set it to that"
        )
    return parts


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
    keys = {*here, "folds", "fold"} - {"training", "validation", "fraction"}
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
        share = f"DATA.VAL_FRACTION {record['fraction']:g}"
        if "folds" in record:
            share = f"DATA.FOLD {record['fold']}/{record['folds']}"
        validation = f"held out of {validation} by {how} ({share})"
    elif rule == "none":
        validation = f"all of {validation}"
    end = f"{validation}, {counted(len(val.classes), 'class')}"
    return (
        f"validation images: {end}"
        if config.START.EVAL
        else f"training images: {record['training']}, validation: {end}"
    )


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
    text = io.StringIO()
    rows = ((key.decode(errors="surrogateescape"), part) for key in keys)
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


def _parts(
    image_set: ImageSet, record: dict, choose: Callable[[], tuple[np.ndarray, list[str]]]
) -> tuple[ImageSet, ImageSet]:
    """The images that `choose` does not hold out, and those that it does. Of an indexed set, that is looked up."""

    def build(path: Path | None) -> Index:
        held_out, notes = choose()
        writer = IndexWriter(path, {f"{part}.{column}": kind for part in PARTS for column, kind in COLUMNS.items()})
        for part, chosen in zip(PARTS, (~held_out, held_out), strict=True):
            writer.add(f"{part}.row", rows := np.flatnonzero(chosen))
            writer.add(f"{part}.target", image_set.targets[rows])
        return writer.finish({"of": known_by, "notes": notes})

    index, whole = image_set.index, image_set.rows is None
    known_by = [index.id if index else "", *(record[each] for each in ("rule", "fraction", "seed"))]
    ending = "split"
    if "folds" in record:  # each fold has a file, since runs of several folds may go on at once
        known_by += [record["folds"], record["fold"]]
        ending += f"-{record['fold']}-of-{record['folds']}"
    paths = [index.path.with_suffix(f".{ending}{index.path.suffix}")] if index and index.path and whole else []
    drawn = open_or_build(paths, lambda found: found.facts.get("of") == known_by, build)
    parts = []
    for name in PARTS:
        part = image_set.take(drawn.column(f"{name}.row"))
        part.targets, part.split = drawn.column(f"{name}.target"), record
        part.notes += tuple(drawn.facts["notes"])
        parts.append(part)
    return tuple(parts)


def _hashes(keys: Iterable[list[bytes]], seed: int) -> np.ndarray:
    """uint64 of each key. Names are compared as Unicode does: a Mac writes umlauts as two characters."""
    with_seed, found = hashlib.blake2b(digest_size=HASH_BYTES, key=str(seed).encode()), []

    def digest(name: bytes) -> bytes:
        hashed = with_seed.copy()
        hashed.update(name)
        return hashed.digest()

    for chunk in keys:
        names = chunk if b"".join(chunk).isascii() else [_composed(name) for name in chunk]
        found.append(np.frombuffer(b"".join(map(digest, names)), dtype=">u8").astype(np.uint64))
    return np.concatenate([*found, np.empty(0, np.uint64)])


def _composed(name: bytes) -> bytes:
    text = unicodedata.normalize("NFC", name.decode(errors="surrogateescape"))
    return text.encode(errors="surrogateescape")


def _lowest_of_each_class(image_set: ImageSet, hashes: np.ndarray) -> np.ndarray:
    """bool [N]: the images with the lowest hash of each class, where no class loses all that it has to train on."""
    labels, images = image_set.targets, np.arange(len(image_set))
    if sets := image_set.label_sets:
        images = np.repeat(images, np.diff(sets.starts)[labels])
        labels = np.concatenate([np.empty(0, np.int32), *(sets[target] for target in labels.tolist())])
    # Images with the same hash are one group. Each is looked at once: what a class cannot lose, it cannot lose later.
    distinct, of_image = np.unique(hashes, return_inverse=True)
    groups = of_image[images]
    starts = [0, *np.cumsum(np.bincount(groups, minlength=len(distinct))).tolist()]
    by_group = labels[np.argsort(groups, kind="stable")].tolist()
    chosen, left = np.zeros(len(distinct), dtype=bool), image_set.count_classes().tolist()
    seen, have_one = set(), set()
    order = np.lexsort((groups, labels))
    for label, group in zip(labels[order].tolist(), groups[order].tolist(), strict=True):
        if label in have_one or group in seen:
            continue
        seen.add(group)
        taken = Counter(by_group[starts[group] : starts[group + 1]])
        if all(count < left[number] for number, count in taken.items()):
            chosen[group] = True
            have_one.update(taken)
            for number, count in taken.items():
                left[number] -= count
    return chosen[of_image]
