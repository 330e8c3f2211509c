"""The tables of an evaluation: predictions.csv, per_class.csv and confusion.csv."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from datasets import ImageSet
from engine.evaluation.all_scores import Ranking
from engine.evaluation.tally import MOST_SCORES, ImageResults, LabelResults
from engine.record.saved_files import write_table
from utils.distributed import Process
from utils.log import Log

PREDICTIONS, PER_CLASS, CONFUSION = "predictions.csv", "per_class.csv", "confusion.csv"
PREDICTION_COLUMNS = ("image", "label", "prediction", "probability", "label_probability")
COUNTED_COLUMNS = ("class", "precision", "recall", "f1", "count", "predicted", "taken_for", "times_taken_for")
RATE_COLUMNS = ("sensitivity", "specificity", "auc", "average_precision")
CLASS_COLUMNS = COUNTED_COLUMNS + RATE_COLUMNS
CELL_COLUMNS = ("label", "prediction", "count")
CORNER = "label \\ prediction"  # the top left cell of the matrix
# The most classes for which confusion.csv is a matrix (of 8 MB). With more classes, the file lists the non-zero cells.
MOST_CLASSES = 2000
SEPARATOR = "|"  # separates several labels of an image

Results = ImageResults | LabelResults


class Names:
    """The names of classes. An output without a class is named by its number, such as "class 7"."""

    def __init__(self, classes: Sequence[str]):
        self._classes = classes

    def __getitem__(self, number: int) -> str:
        return self._classes[number] if number < len(self._classes) else f"class {number}"

    def shown(self, results: Results) -> np.ndarray:
        """Return the classes of the data set, and any other class that was predicted."""
        actual, predicted, _ = results.counts
        is_shown = (actual + predicted) > 0
        is_shown[: len(self._classes)] = True
        return np.flatnonzero(is_shown)


def with_ranking(
    results: Results, process: Process, log: Log, should_stop: Callable[[], bool] = lambda: False
) -> Results:
    """Return the results with the AUC and average precision of each class, unless `should_stop` ends it. Collective."""
    num_images, num_classes = len(results.indices), results.counts.shape[1]
    if scores := results.local.scores:
        return replace(results, ranking=scores.ranking(process, should_stop))
    log.say(
        f"per_class.csv: auc and average_precision are empty, because {num_images:,} images x {num_classes:,} classes "
        f"are more than {MOST_SCORES:,} scores"
    )
    return replace(results, ranking=Ranking(*np.full((2, num_classes), np.nan)))


def write_tables(folder: Path, results: Results, image_set: ImageSet) -> None:
    """Write all tables of one evaluation. Raise OSError if the disk is full."""
    names = Names(image_set.classes)
    rows = prediction_rows(results, image_set, names)
    write_table(folder / PREDICTIONS, PREDICTION_COLUMNS, rows)
    write_table(folder / PER_CLASS, CLASS_COLUMNS, class_rows(results, names))
    if isinstance(results, ImageResults):
        write_table(folder / CONFUSION, *confusion_rows(results, names))


def prediction_rows(results: Results, image_set: ImageSet, names: Names) -> Iterator[tuple[str, ...]]:
    """Yield a row for each image that could be read."""
    if isinstance(results, LabelResults):
        yield from label_rows(results, image_set, names)
        return
    columns = results.indices, results.labels, results.predictions, results.probabilities, results.label_probabilities
    for index, label, prediction, *probabilities in zip(*(each.tolist() for each in columns), strict=True):
        yield image_set.table_name(index), names[label], names[prediction], *map(format_share, probabilities)


def label_rows(results: LabelResults, image_set: ImageSet, names: Names) -> Iterator[tuple[str, ...]]:
    """Yield rows with all labels in one cell, all predicted classes in another, and their probabilities in two more."""
    starts, ends = (np.searchsorted(results.images, results.indices, side=side) for side in ("left", "right"))
    for index, start, end in zip(results.indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        cells = {}
        for name, chosen in (("label", results.are_labels), ("prediction", results.are_predicted)):
            rows = start + np.flatnonzero(chosen[start:end])
            cells[name] = SEPARATOR.join(names[number] for number in results.classes[rows].tolist())
            cells[f"{name}s"] = SEPARATOR.join(map(format_share, results.probabilities[rows].tolist()))
        yield image_set.table_name(index), cells["label"], cells["prediction"], cells["predictions"], cells["labels"]


def class_rows(results: Results, names: Names) -> Iterator[tuple]:
    """Yield a row for each class. Undefined values, such as the recall of a class without images, stay empty."""
    taken_for = most_taken_for(results) if isinstance(results, ImageResults) else {}
    rates = class_rates(results)
    for number in names.shown(results).tolist():
        actual, predicted, right = results.counts[:, number].tolist()
        other, times = taken_for.get(number, (None, 0))
        yield (
            names[number],
            format_share(right / predicted) if predicted else "",
            format_share(right / actual) if actual else "",
            format_share(2 * right / (actual + predicted)) if actual + predicted else "",
            actual,
            predicted,
            "" if other is None else names[other],
            times or "",
            *(format_share(each) if math.isfinite(each) else "" for each in rates[number].tolist()),
        )


def class_rates(results: Results) -> np.ndarray:
    """Return float64 [classes, 4], the RATE_COLUMNS of each class. Undefined rates are NaN."""
    num_images = len(results.indices)
    actual, predicted, right = results.counts.astype(np.float64)
    others = num_images - actual
    ranking = results.ranking or Ranking(*np.full((2, len(actual)), np.nan))
    with np.errstate(invalid="ignore"):
        specificity = (others - (predicted - right)) / others
        return np.stack([right / actual, specificity, ranking.auc, ranking.average_precision], axis=1)


def class_records(results: Results, names: Names) -> dict[str, dict[str, float | None]]:
    """Return {class: {rate: value}} for results.json. Undefined rates are None."""
    rates, numbers = class_rates(results).tolist(), names.shown(results).tolist()
    records = {names[each]: zip(RATE_COLUMNS, rates[each], strict=True) for each in numbers}
    return {name: {key: rate if math.isfinite(rate) else None for key, rate in row} for name, row in records.items()}


def most_taken_for(results: ImageResults) -> dict[int, tuple[int, int]]:
    """Return {class with mistakes: (its most frequent wrong prediction, count)}. The first prediction wins a tie."""
    labels, predictions, counts = cells(results)
    found: dict[int, tuple[int, int]] = {}
    for label, prediction, count in zip(labels.tolist(), predictions.tolist(), counts.tolist(), strict=True):
        if label != prediction and count > found.get(label, (0, 0))[1]:
            found[label] = prediction, count
    return found


def cells(results: ImageResults) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the non-zero cells of the confusion matrix, row by row: labels, predictions, counts."""
    num_classes = results.counts.shape[1]
    numbers, counts = np.unique(results.labels * num_classes + results.predictions, return_counts=True)
    return *np.divmod(numbers, max(num_classes, 1)), counts


def confusion_rows(results: ImageResults, names: Names) -> tuple[Sequence[str], Iterable[Sequence]]:
    """Return the header and the rows of confusion.csv: a matrix, or a list of its cells."""
    labels, predictions, counts = cells(results)
    shown = names.shown(results)
    if len(shown) > MOST_CLASSES:
        rows = zip(labels.tolist(), predictions.tolist(), counts.tolist(), strict=True)
        return CELL_COLUMNS, ((names[label], names[prediction], count) for label, prediction, count in rows)
    matrix = np.zeros((len(shown), len(shown)), np.int64)
    matrix[np.searchsorted(shown, labels), np.searchsorted(shown, predictions)] = counts
    titles = [names[number] for number in shown.tolist()]
    return (CORNER, *titles), ([title, *row] for title, row in zip(titles, matrix.tolist(), strict=True))


def format_share(value: float) -> str:
    return f"{value:.6f}"
