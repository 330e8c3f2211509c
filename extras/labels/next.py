"""Chooses the photos whose labels will help a model most, and writes them to next.csv and next.png."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from datasets.sources.images import FileImages
from engine.features.embedder import Embedder, Photos, Table, normalized, thumbnail
from engine.predict.output import copy_into
from engine.predict.pictures import Tile
from engine.record.saved_files import write_table
from extras.labels.alike import Pictures, find_groups
from extras.labels.data import DataSet
from extras.labels.review import draw_sheets, refuse_other_sheets
from utils.errors import ConfigError, cause_of
from utils.files import Kind, refuse_other_kind
from utils.text import counted

TABLE, SHEET = "next.csv", "next.png"
COLUMNS = ("image", "order", "guess", "probability", "reason")
KIND = Kind("a table of scripts/labels.py -next", (b"\xef\xbb\xbfimage,order,",))
# With a run, k-means divides the least certain photos into N clusters and chooses the photo nearest to each centre.
# BENCHMARKS.md, "Photos to label next", compares this with other methods. Rejected: extra centres at labelled photos, and
# weights by margin. Neither made a difference larger than the noise.
NUM_UNSURE = 4  # the number of photos that are clustered, for each photo to choose
NUM_ROUNDS = 10  # rounds of k-means
BLOCK = 4096  # the number of photos that are compared with all centres at once


# --- the command ---


def choose_next(given: Namespace, photos: Photos, embedder: Embedder, data: DataSet | None) -> int:
    """Choose photos and write them. Return the exit code, which is 2 if some photos cannot be read.

    `given` has the flags `next`, `output`, `into` and `strangers`. `data`: the images on which the classifier was trained
    and evaluated, or None if the weights are not those of a run.
    """
    check_output(given.output)
    images = photos.images(embedder.rules)
    table = embedder(images)
    num_unreadable = len(photos) - len(table.indices)
    is_new, num_labelled = find_new(images, table.indices, data)
    left_out = f", {num_labelled:,} of them left out (labelled already)" if num_labelled else ""
    print(f"{photos.folder}: {counted(len(photos), 'photo')}{left_out}")
    if not is_new.any():
        raise ConfigError(
            f"-next: no photo in {photos.folder} can be chosen, because none is new and readable; add photos"
        )
    table = Table(*(column[is_new] for column in table))
    if len(table.indices) < given.next:
        print(
            f"only {counted(len(table.indices), 'photo')} can be chosen, fewer than {given.next:,}, so all are chosen"
        )
    probabilities = torch.from_numpy(table.logits).softmax(1).numpy()
    is_stranger = table.known < 0
    if data is not None and np.isnan(table.known).all():
        print(
            f"strangers are not recognized, because {embedder.trained.source} has no statistics of the training images"
        )

    def choose(rows: np.ndarray, count: int) -> np.ndarray:
        return useful(table.features[rows], probabilities[rows], count)

    chosen = in_order(choose, given.next, is_stranger, given.strangers)
    numbers, cells = table.indices[chosen].tolist(), []
    for order, (number, row) in enumerate(zip(numbers, chosen, strict=True), start=1):
        known = describe(probabilities[row], bool(is_stranger[row]), embedder.trained.classes)
        cells.append([photos[number], order, *known])
    write_next(given, cells, numbers, images)
    if num_unreadable:
        print(f"{num_unreadable} of {counted(len(photos), 'image')} could not be read")
    return 2 if num_unreadable else 0


def check_output(folder: Path) -> None:
    """Make the folder of the table and the sheets. Raise ConfigError if they would replace files of somebody else."""
    refuse_other_kind("-output", folder / TABLE, KIND, "choose another folder")
    refuse_other_sheets(folder / SHEET, folder / TABLE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"-output: cannot make the folder {folder} ({cause_of(error)}); choose another") from None


def find_new(images: FileImages, indices: np.ndarray, data: DataSet | None) -> tuple[np.ndarray, int]:
    """Return whether each photo is new, bool [n], and the number of photos that have a label.

    A photo has a label if it is equal or nearly equal to an image of the data. Of several nearly equal photos without a
    label, only the first is new.
    """
    known = [] if data is None else list(data.images())
    pictures = Pictures(len(known) + len(indices))
    pictures.read(known + [(images, index) for index in indices.tolist()])
    first = np.arange(len(known) + len(indices))  # the number of the first of the copies of each image
    for group in find_groups(pictures):
        first[list(group)] = min(group)
    first = first[len(known) :] - len(known)  # negative: the number of an image of the data
    return first == np.arange(len(first)), int((first < 0).sum())


def describe(probabilities: np.ndarray, is_stranger: bool, classes: Sequence[str]) -> tuple[str, str, str]:
    """Return the guess for a photo, its probability, and the reason to choose the photo.

    `probabilities`: float32 [classes]. Without a classifier, guess and probability are empty.
    """
    if len(probabilities) < 2:
        return "", "", "typical of the photos"
    first, second = np.argsort(-probabilities, kind="stable")[:2].tolist()
    reason = f"or {classes[second]} ({probabilities[second]:.2f})"
    if is_stranger:
        reason = "may show none of the classes"
    return classes[first], f"{probabilities[first]:.4f}", reason


def write_next(given: Namespace, cells: Sequence[list], numbers: Sequence[int], images: FileImages) -> None:
    """Write the table with these cells and the sheets with the images of these numbers, and copy the photos."""
    folder: Path = given.output

    def tiles(part: slice) -> list[Tile]:
        captions = ([f"{guess} {probability}", path, reason] for path, _, guess, probability, reason in cells[part])
        return [Tile(thumbnail(images, each), lines) for each, lines in zip(numbers[part], captions, strict=True)]

    try:
        sheets = [*draw_sheets(folder / SHEET, tiles, len(cells))]
        write_table(folder / TABLE, COLUMNS, cells, encoding="utf-8-sig")  # the BOM makes Excel read the file as UTF-8
    except OSError as error:
        raise ConfigError(f"-output: cannot write to {folder} ({cause_of(error)}); choose another folder") from None
    print(f"{folder / TABLE}: {counted(len(cells), 'photo')} to label; look at {sheets[0]}")
    if given.into:
        for path, *_ in cells:
            copy_into(given.into, Path(path))
        print(f"{given.into}: has copies of these photos; move each copy into the folder of its class")


# --- which photos ---


def in_order(
    choose: Callable[[np.ndarray, int], np.ndarray], count: int, is_stranger: np.ndarray, takes_strangers: bool
) -> list[int]:
    """Return the rows of at most `count` photos, the most useful first. Strangers come last unless `takes_strangers`.

    `choose(rows, count)` returns positions in `rows`. `is_stranger`: bool [n], whether a photo seems to show none of the
    classes.
    """
    groups = [np.arange(len(is_stranger))] if takes_strangers else map(np.flatnonzero, (~is_stranger, is_stranger))
    chosen: list[int] = []
    for rows in groups:
        if wanted := min(count - len(chosen), len(rows)):
            chosen += rows[choose(rows, wanted)].tolist()
    return chosen


def useful(features: np.ndarray, probabilities: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of `count` photos, the most useful first.

    `features`: float32 [n, D]. `probabilities`: float32 [n, classes] from a classifier, or [n, 0]. Without a classifier,
    return typical photos. With a classifier, return typical photos among those of which it is least sure.
    """
    features = normalized(features)
    if probabilities.shape[1] < 2:
        return typical(features, count)
    second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
    unsure = np.argsort(first - second, kind="stable")[: NUM_UNSURE * count]
    return unsure[np.sort(typical(features[unsure], count))]


def typical(features: np.ndarray, count: int) -> np.ndarray:
    """Return the rows nearest to the centres of `count` clusters, the row of the largest cluster first.

    The features have length 1. Each row belongs to the cluster with the nearest centre (k-means).
    """
    centres = features[far_apart(features, count)]
    for _ in range(NUM_ROUNDS):
        owners, _ = nearest(features, centres)
        for number in np.unique(owners).tolist():
            centres[number] = features[owners == number].mean(0)
    owners, distances = nearest(features, centres)
    order = np.lexsort((distances, owners))
    numbers, starts, sizes = np.unique(owners[order], return_index=True, return_counts=True)
    chosen = order[starts[np.argsort(-sizes, kind="stable")]]
    rest = np.delete(np.arange(len(features)), chosen)  # equal features leave clusters empty
    return np.concatenate([chosen, rest])[:count]


def far_apart(features: np.ndarray, count: int) -> np.ndarray:
    """Return `count` random rows that are far from each other (the start of k-means++)."""
    random, squares = np.random.default_rng(0), (features**2).sum(1)
    rows = [int(random.integers(len(features)))]
    distances = np.full(len(features), np.inf)
    while len(rows) < count:
        row = rows[-1]
        distances = np.minimum(distances, np.maximum(squares + squares[row] - 2 * features @ features[row], 1e-9))
        rows.append(int(random.choice(len(features), p=distances / distances.sum())))
    return np.array(rows)


def nearest(features: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the nearest centre of each row, and the squared distance to it, less the square of the row."""
    owners, distances = np.empty(len(features), np.int64), np.empty(len(features), np.float32)
    for start in range(0, len(features), BLOCK):
        part = slice(start, start + BLOCK)
        found = (centres**2).sum(1) - 2 * features[part] @ centres.T
        owners[part], distances[part] = found.argmin(1), found.min(1)
    return owners, distances
