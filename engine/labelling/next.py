"""Chooses the photos whose labels will help a model most, and writes them to next.csv and next.png."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from datasets.identity import ImageContents
from datasets.image_set import ImageSet
from engine.features.embedder import Photos, Table, normalized, thumbnail
from engine.labelling.data import DataSet
from engine.labelling.review import draw_sheets, refuse_other_sheets
from engine.predict.pictures import Tile
from engine.record.saved_files import write_table
from utils.errors import ConfigError, cause_of, naming_output
from utils.files import Kind, refuse_other_kind

TABLE, SHEET = "next.csv", "next.png"
COLUMNS = ("image", "order", "guess", "probability", "reason")  # `describe` returns the last three
KIND = Kind("a table of halfstep labels -next", (b"\xef\xbb\xbfimage,order,",))
LEFT_OUT, LEFT_OUT_COLUMNS = "left_out.csv", ("image", "same_as", "reason")
LABELLED, COPY = "labelled already", "a copy of another photo"
LEFT_OUT_KIND = Kind("a table of halfstep labels -next", (b"\xef\xbb\xbfimage,same_as,",))
# Without a classifier, k-means divides all photos into N clusters and chooses the photo nearest to each centre. With a
# classifier, each chosen photo stands for the uncertain photos that are similar to it. BENCHMARKS.md, "Photos to label
# next", compares this with other methods. Rejected: k-means with a classifier, which was worse than random photos on
# emoji from 100 labels on, and the features of labelled photos, which made no difference.
WIDTH = 0.2  # photos count as similar if their cosine is above 1 - WIDTH, or a little less
NUM_UNSURE = 15  # the number of least certain photos that are compared, for each photo to choose
MOST_AT_ONCE = 400  # photos that are chosen from the same least certain photos
NUM_ROUNDS = 10  # rounds of k-means
BLOCK = 4096  # the number of photos that are compared with all centres at once


# --- files ---


def check_output(folder: Path) -> None:
    """Make the folder of the table and the sheets. Raise ConfigError if they would replace files of somebody else."""
    refuse_other_kind("-output", folder / TABLE, KIND, "choose another folder")
    refuse_other_kind("-output", folder / LEFT_OUT, LEFT_OUT_KIND, "choose another folder")
    refuse_other_sheets(folder / SHEET, folder / TABLE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"-output: cannot make the folder {folder} ({cause_of(error)}); choose another") from None


def write_left_out(folder: Path, twins: Sequence[tuple[str, str, str]]) -> None:
    with naming_output(folder):
        write_table(folder / LEFT_OUT, LEFT_OUT_COLUMNS, twins, encoding="utf-8-sig")


def write_next(folder: Path, cells: Sequence[list], numbers: Sequence[int], images: ImageSet) -> list[Path]:
    """Write the table with these cells, and sheets with these images. Return the paths of the sheets."""

    def tiles(part: slice) -> list[Tile]:
        captions = ([f"{guess} {probability}", path, reason] for path, _, guess, probability, reason in cells[part])
        return [Tile(thumbnail(images, each), lines) for each, lines in zip(numbers[part], captions, strict=True)]

    with naming_output(folder):
        sheets = [*draw_sheets(folder / SHEET, tiles, len(cells))]
        write_table(folder / TABLE, COLUMNS, cells, encoding="utf-8-sig")  # the BOM makes Excel read the file as UTF-8
    return sheets


# --- which photos ---


def find_new(
    images: ImageSet, indices: np.ndarray, photos: Photos, data: DataSet | None
) -> tuple[np.ndarray, list[tuple[str, str, str]]]:
    """Return whether each photo is new, bool [n], and for each other photo its path, its twin, and why it is left out.

    A photo has a label if it is the same as an image of the data. Of several photos without a label that are the same,
    only the first is new.
    """
    num_known = 0 if data is None else len(data)

    def find(number: int) -> tuple[ImageSet, int]:
        return data.find(number) if number < num_known else (images, int(indices[number - num_known]))

    contents = ImageContents(num_known + len(indices), find)
    contents.read()
    is_new, twins = np.ones(len(indices), bool), []
    for group in contents.groups():
        first, *others = sorted(group)
        for photo in (number - num_known for number in others if number >= num_known):
            is_new[photo] = False
            twins.append((photos[indices[photo]], contents.name(first), LABELLED if first < num_known else COPY))
    return is_new, twins


def choose_photos(
    table: Table, count: int, takes_strangers: bool, photos: Photos, classes: Sequence[str]
) -> tuple[list[int], list[list]]:
    """Return the numbers of at most `count` photos, the most useful first, and their rows of next.csv."""
    probabilities = torch.from_numpy(table.logits).softmax(1).numpy()
    is_stranger = table.known < 0

    def choose(rows: np.ndarray, count: int) -> np.ndarray:
        return useful(table.features[rows], probabilities[rows], count)

    chosen = in_order(choose, count, is_stranger, takes_strangers)
    numbers, cells = table.indices[chosen].tolist(), []
    for order, (number, row) in enumerate(zip(numbers, chosen, strict=True), start=1):
        cells.append([photos[number], order, *describe(probabilities[row], bool(is_stranger[row]), classes)])
    return numbers, cells


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


def in_order(
    choose: Callable[[np.ndarray, int], np.ndarray], count: int, is_stranger: np.ndarray, takes_strangers: bool
) -> list[int]:
    """Return the rows of at most `count` photos, the most useful first. Strangers come last unless `takes_strangers`.

    `choose(rows, count)` returns positions in `rows`. `is_stranger`: bool [n], whether a photo seems to show none of
    the classes.
    """
    groups = [np.arange(len(is_stranger))] if takes_strangers else map(np.flatnonzero, (~is_stranger, is_stranger))
    chosen: list[int] = []
    for rows in groups:
        if number := min(count - len(chosen), len(rows)):
            chosen += rows[choose(rows, number)].tolist()
    return chosen


def useful(features: np.ndarray, probabilities: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of `count` photos, the most useful first.

    `features`: float32 [n, D]. `probabilities`: float32 [n, classes] from a classifier, or [n, 0]. Without a
    classifier, return typical photos. With a classifier, return photos that are similar to many of which it is not
    sure.
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
        best = rows[covering(features[rows], doubts[rows], part)]
        chosen += best.tolist()
        rest = rest[~np.isin(rest, best)]
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
    """Return the number of the nearest centre of each row, and the squared distance minus the square of the row."""
    owners, distances = np.empty(len(features), np.int64), np.empty(len(features), np.float32)
    for start in range(0, len(features), BLOCK):
        part = slice(start, start + BLOCK)
        squares = (centres**2).sum(1) - 2 * features[part] @ centres.T
        owners[part], distances[part] = squares.argmin(1), squares.min(1)
    return owners, distances
