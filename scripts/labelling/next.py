"""Chooses the photos whose labels will help a model most, and writes them to next.csv and next.png."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from datasets.identity import ImageContents
from datasets.sources.files import refuse_copies
from datasets.sources.images import FileImages
from datasets.types import ImageSet
from engine.features.embedder import Embedder, Photos, Table, normalized, thumbnail
from engine.predict.output import copy_into
from engine.predict.pictures import Tile
from engine.record.saved_files import write_table
from scripts.command_line import naming_output
from scripts.labelling.data import DataSet
from scripts.labelling.review import draw_sheets, refuse_other_sheets
from utils.errors import ConfigError, cause_of
from utils.files import Kind, refuse_other_kind
from utils.text import counted

TABLE, SHEET = "next.csv", "next.png"
COLUMNS = ("image", "order", "guess", "probability", "reason")
KIND = Kind("a table of scripts/labels.py -next", (b"\xef\xbb\xbfimage,order,",))
LEFT_OUT, LEFT_OUT_COLUMNS = "left_out.csv", ("image", "same_as", "reason")
LABELLED, COPY = "labelled already", "a copy of another photo"
LEFT_OUT_KIND = Kind("a table of scripts/labels.py -next", (b"\xef\xbb\xbfimage,same_as,",))
# Without a classifier, k-means divides all photos into N clusters and chooses the photo nearest to each centre. With a
# classifier, each chosen photo stands for the uncertain photos that are similar to it. BENCHMARKS.md, "Photos to label next",
# compares this with other methods. Rejected: k-means with a classifier, which was worse than random photos on emoji from
# 100 labels on, and the features of labelled photos, which made no difference.
WIDTH = 0.2  # photos count as similar if their cosine is above 1 - WIDTH, or a little less
NUM_UNSURE = 15  # the number of least certain photos that are compared, for each photo to choose
MOST_AT_ONCE = 400  # photos that are chosen from the same least certain photos
NUM_ROUNDS = 10  # rounds of k-means
BLOCK = 4096  # the number of photos that are compared with all centres at once


# --- the command ---


def choose_next(given: Namespace, photos: Photos, embedder: Embedder, data: DataSet | None) -> int:
    """Choose photos and write them. Return the exit code, which is 2 if some photos cannot be read.

    `given` has the flags `next`, `output`, `into`, `no_copies` and `strangers`. `data`: the images on which the classifier
    was trained and evaluated, or None if the weights are not those of a run.
    """
    check_output(given.output)
    photos = photos.for_model(embedder.pixels, print)
    if given.into:
        refuse_copies(embedder.pixels)
    images = photos.images(embedder.pixels)
    table = embedder(images)
    num_unreadable = len(photos) - len(table.indices)
    is_new, twins = np.ones(len(table.indices), bool), []
    if not given.no_copies:
        is_new, twins = find_new(images, table.indices, photos, data)
    with naming_output(given.output):
        write_table(given.output / LEFT_OUT, LEFT_OUT_COLUMNS, twins, encoding="utf-8-sig")
    counts = Counter(reason for *_, reason in twins).items()
    left_out = f", left out: {', '.join(f'{count:,} {reason}' for reason, count in counts)}" if twins else ""
    print(f"{photos.folder}: {counted(len(photos), 'photo')}{left_out}; see {given.output / LEFT_OUT}")
    if not is_new.any():
        raise ConfigError(
            f"-next: no photo in {photos.folder} can be chosen, because none is new and readable; add photos, or leave out none "
            f"with -no_copies (see {given.output / LEFT_OUT})"
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
            f"strangers are not recognized, because {embedder.trained.source} has no statistics of the validation images"
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
    refuse_other_kind("-output", folder / LEFT_OUT, LEFT_OUT_KIND, "choose another folder")
    refuse_other_sheets(folder / SHEET, folder / TABLE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"-output: cannot make the folder {folder} ({cause_of(error)}); choose another") from None


def find_new(
    images: FileImages, indices: np.ndarray, photos: Photos, data: DataSet | None
) -> tuple[np.ndarray, list[tuple[str, str, str]]]:
    """Return whether each photo is new, bool [n], and for each other photo its path, its twin, and why it is left out.

    A photo has a label if it is the same as an image of the data. Of several photos without a label that are the same, only
    the first is new.
    """
    num_known = 0 if data is None else len(data)

    def find(number: int) -> tuple[ImageSet, int]:
        return data.find(number) if number < num_known else (images, int(indices[number - num_known]))

    contents = ImageContents(num_known + len(indices), find)
    contents.read()
    is_new, twins = np.ones(len(indices), bool), []
    for group in contents.groups():
        first, *others = sorted(group)
        part, index = find(first)
        for photo in (number - num_known for number in others if number >= num_known):
            is_new[photo] = False
            twins.append((photos[indices[photo]], part.name(index), LABELLED if first < num_known else COPY))
    return is_new, twins


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

    with naming_output(folder):
        sheets = [*draw_sheets(folder / SHEET, tiles, len(cells))]
        write_table(folder / TABLE, COLUMNS, cells, encoding="utf-8-sig")  # the BOM makes Excel read the file as UTF-8
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
    return typical photos. With a classifier, return photos that are similar to many of which it is not sure.
    """
    if probabilities.shape[1] < 2:
        return typical(normalized(features), count)
    features = normalized(features - features.mean(0))
    second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
    doubts = 1 - (first - second)
    chosen, rest = [], np.argsort(-doubts, kind="stable")
    while len(chosen) < count:
        part = min(count - len(chosen), MOST_AT_ONCE)
        rows = rest[: NUM_UNSURE * part]
        found = rows[covering(features[rows], doubts[rows], part)]
        chosen += found.tolist()
        rest = rest[~np.isin(rest, found)]
    return np.array(chosen)


def covering(features: np.ndarray, doubts: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` doubtful rows to which the other doubtful rows are similar, the most useful first.

    Each one adds most to the sum over all rows of doubt x similarity to the most similar chosen row.
    """
    similarities = doubts[:, None] * np.exp((features @ features.T - 1) / WIDTH) * doubts
    covered = np.zeros(len(features), np.float32)
    gains = similarities.sum(1)
    chosen: list[int] = []
    while len(chosen) < min(count, len(features)):
        row = int(gains.argmax())
        gains[row] = np.maximum(similarities[row] - covered, 0).sum()  # the other old gains are upper bounds
        if row == gains.argmax():
            chosen.append(row)
            covered, gains[row] = np.maximum(covered, similarities[row]), -np.inf
    return np.array(chosen)


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
