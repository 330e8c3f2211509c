"""Chooses the photos whose labels will help a model most, and writes them to next.csv and next.png."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.predict.output import copy_into
from engine.predict.pictures import Tile
from engine.record.saved_files import write_table
from extras.embeddings import Embedder, Photos, Table, normalized, thumbnail
from extras.labels.alike import Pictures, find_groups
from extras.labels.data import DataSet
from extras.labels.review import draw_sheets
from utils.errors import ConfigError, cause_of
from utils.text import counted

TABLE, SHEET = "next.csv", "next.png"
COLUMNS = ("image", "order", "guess", "probability", "reason")
BLOCK = 4096  # photos that are compared with all centres at once
NUM_UNSURE = 4  # photos that are clustered for each photo that is chosen by a classifier
NUM_ROUNDS = 10  # of k-means


class Row(NamedTuple):
    """A chosen photo."""

    index: int  # of the photo
    guess: str  # class name; empty without a trained classifier
    probability: float | None
    reason: str


def choose_next(given: Namespace, photos: Photos, embedder: Embedder, data: DataSet | None) -> int:
    """Choose photos and write them. Return the exit code, which is 2 if some photos cannot be read.

    `data`: the images with labels on which the classifier was trained, or None if it cannot guess the photos' classes.
    """
    count, images = given.next, photos.images(embedder.rules)
    table = embedder(images)
    if not len(table.indices):
        raise ConfigError(f"-next: no photo in {photos.folder} can be read; name another folder")
    is_new, num_labelled = find_new(table, photos, embedder, data)
    print(f"{photos.folder}: {counted(len(photos), 'photo')}", end="")
    print(f", {num_labelled:,} of them left out because they have labels already" if num_labelled else "")
    if not is_new.any():
        raise ConfigError(f"-next: every photo in {photos.folder} has a label already; add photos")
    rows = np.flatnonzero(is_new)
    if len(rows) < count:
        print(f"only {counted(len(rows), 'photo')} can be chosen, fewer than {count:,}, so all are")
    probabilities = softmax(table.logits[rows]) if data else None
    is_stranger = np.zeros(len(rows), bool)  # set by extras/strangers.py

    def choose(of_rows: np.ndarray, count: int) -> np.ndarray:
        return useful(table.features[rows[of_rows]], None if probabilities is None else probabilities[of_rows], count)

    chosen = in_order(choose, min(count, len(rows)), is_stranger, given.strangers)
    write_next(given, describe(chosen, rows, table, probabilities, is_stranger, embedder.trained.classes), photos, images)
    if num_unreadable := len(photos) - len(table.indices):
        print(f"{num_unreadable} of {counted(len(photos), 'image')} could not be read")
    return 2 if num_unreadable else 0


def find_new(table: Table, photos: Photos, embedder: Embedder, data: DataSet | None) -> tuple[np.ndarray, int]:
    """Return bool [n], whether each photo of the table is the first of its copies and has no label, and the number with
    a label. A photo has a label if it is equal or nearly equal to an image of the data.
    """
    images, num_known = photos.images(embedder.rules), len(data) if data else 0
    pictures = Pictures(num_known + len(table.indices))
    known = list(data.images()) if data else []
    pictures.read(known + [(images, index) for index in table.indices.tolist()])
    is_new, has_label = np.ones(len(table.indices), bool), np.zeros(len(table.indices), bool)
    for group in find_groups(pictures):
        first, *others = sorted(group)
        copies = np.array([number for number in group if number >= num_known], np.int64) - num_known
        has_label[copies] = first < num_known
        is_new[np.array(others, np.int64)[np.array(others) >= num_known] - num_known] = False
    return is_new & ~has_label, int(has_label.sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def in_order(
    choose: Callable[[np.ndarray, int], np.ndarray], count: int, is_stranger: np.ndarray, takes_strangers: bool
) -> np.ndarray:
    """Return the numbers of `count` photos, the most useful first. Strangers come last unless `takes_strangers`.

    `choose(numbers, count)` returns positions in `numbers`. `is_stranger`: bool [n], whether a photo seems to show none of
    the classes.
    """
    groups = [np.arange(len(is_stranger))] if takes_strangers else map(np.flatnonzero, (~is_stranger, is_stranger))
    chosen = np.empty(0, np.int64)
    for numbers in groups:
        wanted = min(count - len(chosen), len(numbers))
        if wanted:
            chosen = np.concatenate([chosen, numbers[choose(numbers, wanted)]])
    return chosen


def useful(features: np.ndarray, probabilities: np.ndarray | None, count: int) -> np.ndarray:
    """Return the rows of `count` photos, the most useful first.

    `probabilities` [n, classes]: of a classifier. Without them, the photos are typical ones; with them, typical ones among
    those of which the classifier is least sure.
    """
    features = normalized(features)
    if probabilities is None:
        return typical(features, count)
    second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
    unsure = np.argsort(first - second, kind="stable")[: NUM_UNSURE * count]
    return unsure[np.sort(typical(features[unsure], count))]


def typical(features: np.ndarray, count: int) -> np.ndarray:
    """Return the rows [count] nearest to the centres of `count` clusters, those of the largest clusters first."""
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
    """Return random rows [count] that are far from each other: the start of k-means++."""
    random, squares = np.random.default_rng(0), (features**2).sum(1)
    rows = [int(random.integers(len(features)))]
    distances = np.full(len(features), np.inf)
    while len(rows) < count:
        row = rows[-1]
        distances = np.minimum(distances, np.maximum(squares + squares[row] - 2 * features @ features[row], 1e-9))
        rows.append(int(random.choice(len(features), p=distances / distances.sum())))
    return np.array(rows)


def nearest(features: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the nearest centre of each row, and the squared distance to it less the row's square."""
    owners, distances = np.empty(len(features), np.int64), np.empty(len(features), np.float32)
    for start in range(0, len(features), BLOCK):
        part = slice(start, start + BLOCK)
        found = (centres**2).sum(1) - 2 * features[part] @ centres.T
        owners[part], distances[part] = found.argmin(1), found.min(1)
    return owners, distances


def describe(chosen, rows, table, probabilities, is_stranger, classes) -> list[Row]:
    found = []
    for number in chosen.tolist():
        index, guess, probability, reason = int(table.indices[rows[number]]), "", None, "typical of the photos"
        if probabilities is not None:
            first, second = np.argsort(-probabilities[number], kind="stable")[:2].tolist()
            guess, probability = classes[first], float(probabilities[number, first])
            reason = f"or {classes[second]} {probabilities[number, second]:.2f}"
        if is_stranger[number]:
            reason = "may show none of the classes"
        found.append(Row(index, guess, probability, reason))
    return found


def write_next(given: Namespace, rows: Sequence[Row], photos: Photos, images) -> None:
    """Write the table and the sheets, and copy the photos."""
    folder: Path = given.output

    def tiles(part: slice) -> list[Tile]:
        titles = (f"{row.guess} {row.probability:.2f}" if row.guess else "" for row in rows[part])
        return [
            Tile(thumbnail(images, row.index), [title, photos[row.index], row.reason])
            for title, row in zip(titles, rows[part], strict=True)
        ]

    cells = [
        [photos[row.index], order, row.guess, "" if row.probability is None else f"{row.probability:.4f}", row.reason]
        for order, row in enumerate(rows, start=1)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sheets = [*draw_sheets(folder / SHEET, tiles, len(rows))]
        write_table(folder / TABLE, COLUMNS, cells, encoding="utf-8-sig")  # the BOM makes Excel read the file as UTF-8
    except OSError as error:
        raise ConfigError(f"-output: cannot write to {folder} ({cause_of(error)}); choose another folder") from None
    print(f"{folder / TABLE}: {counted(len(rows), 'photo')} to label; look at {sheets[0]}")
    if given.into:
        for row in rows:
            copy_into(given.into, Path(photos[row.index]))
        print(f"{given.into}: copies of these photos; move each into the folder of its class")
