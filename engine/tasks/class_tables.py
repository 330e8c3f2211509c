"""The results of images with classes as tables: predictions.csv, per_class.csv and confusion.csv."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from datasets import ImageSet
from engine.evaluation.all_scores import Ranking
from utils.distributed import Process
from utils.log import Log
from utils.text import counted

# Above this number of scores (images x classes), an evaluation keeps all scores only if images can have several
# labels. 2**26 float32 scores take 256 MiB: ImageNet's validation images need 191 MiB.
MOST_SCORES = 2**26
PER_CLASS_KEY = "per_class"  # the key of the per-class rates in results.json; added at the end of a run
RATES = (PER_CLASS_KEY, "per_output")  # the keys of complete results; the second is for numbers
PREDICTIONS, PER_CLASS, CONFUSION = "predictions.csv", "per_class.csv", "confusion.csv"
# the header of predictions.csv; the values: `rows` of each task
PREDICTION_COLUMNS = ("image", "label", "prediction", "probability", "label_probability")
COUNTED_COLUMNS = ("class", "precision", "recall", "f1", "count", "predicted", "taken_for", "times_taken_for")
RATE_COLUMNS = ("sensitivity", "specificity", "auc", "average_precision")
CLASS_COLUMNS = COUNTED_COLUMNS + RATE_COLUMNS
CELL_COLUMNS = ("label", "prediction", "count")
GROUP = "group_number"  # the column of predictions.csv with the number of each image's group
CORNER = "label \\ prediction"  # the top left cell of the matrix
# The most classes for which confusion.csv is a matrix (of 8 MB). With more classes, the file lists the non-zero cells.
MOST_CLASSES = 2000


class Names:
    """The names of classes. An output without a class is named by its number, such as "class 7"."""

    def __init__(self, classes: Sequence[str]):
        self._classes = classes

    def __getitem__(self, number: int) -> str:
        return self._classes[number] if number < len(self._classes) else f"class {number}"

    def shown(self, counts: np.ndarray) -> np.ndarray:
        """Return the classes of the data set, and any other class that was predicted. `counts` as in ClassResults."""
        is_shown = counts[:2].sum(0) > 0
        is_shown[: len(self._classes)] = True
        return np.flatnonzero(is_shown)


@dataclass(frozen=True)
class ClassResults:
    """The results of each readable image, with its classes.

    Subclasses add a row for each image, or for each class of it.
    """

    indices: np.ndarray  # the index of each readable image in its set
    counts: np.ndarray  # [3, classes]: images, predictions and correct predictions of each class
    local: Any  # this process's results, with all scores of its images if kept
    ranking: Ranking | None  # None: not computed yet
    has_matrix: ClassVar[bool] = False  # whether there is a confusion matrix, with the method `cells`

    def complete(self, process: Process, log: Log, should_stop: Callable[[], bool] = lambda: False) -> "ClassResults":
        """Return the results with the AUC and average precision of each class, unless `should_stop` ends it.

        Collective.
        """
        num_images, num_classes = len(self.indices), self.counts.shape[1]
        if scores := self.local.scores:
            return replace(self, ranking=scores.ranking(process, should_stop))
        log.say(
            f"per_class.csv: auc and average_precision are empty, because {num_images:,} images x {num_classes:,} "
            f"classes are more than {MOST_SCORES:,} scores"
        )
        return replace(self, ranking=Ranking(*np.full((2, num_classes), np.nan)))

    @property
    def is_complete(self) -> bool:
        return self.ranking is not None

    def tables(self, image_set: ImageSet) -> Iterator[tuple[str, Sequence[str], Iterable[Sequence]]]:
        """Yield name, header and rows of each table."""
        names = Names(image_set.classes)
        yield PREDICTIONS, *with_groups(PREDICTION_COLUMNS, self.rows(image_set, names), self.indices, image_set)
        yield PER_CLASS, CLASS_COLUMNS, self.class_rows(names)
        if self.has_matrix:
            yield CONFUSION, *self.confusion_rows(names)

    def rows(self, image_set: ImageSet, names: Names) -> Iterator[tuple[str, ...]]:
        """Yield a row for each image that could be read."""
        raise NotImplementedError

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the non-zero cells of the confusion matrix, row by row: labels, predictions, counts."""
        raise NotImplementedError

    def figures(self, image_set: ImageSet) -> dict[str, Any]:
        """Return {class: {rate: value}} for results.json. Undefined rates are None."""
        if not self.is_complete:
            return {}
        names = Names(image_set.classes)
        rates, numbers = self.class_rates().tolist(), names.shown(self.counts).tolist()
        records = {names[each]: zip(RATE_COLUMNS, rates[each], strict=True) for each in numbers}
        finite = {
            name: {key: rate if math.isfinite(rate) else None for key, rate in row} for name, row in records.items()
        }
        return {PER_CLASS_KEY: finite}

    def scores_of_images(self, metric: str, process: Process) -> np.ndarray | None:
        """Return a value for each image, whose mean is this metric, or None if there are no such values. Collective."""
        raise NotImplementedError

    def title_of_errors(self, number: int, shown: int) -> str:
        """Return the title of the sheet of mistakes. `shown`: how many of them it shows."""
        most = f", the {shown} that the model was most certain of" if shown < number else ""
        return f"{counted(number, 'mistake')} in {counted(len(self.indices), 'validation image')}{most}"

    def class_rows(self, names: Names) -> Iterator[tuple]:
        """Yield a row for each class. Undefined values, such as the recall of a class without images, stay empty."""
        taken_for = self.most_taken_for() if self.has_matrix else {}
        rates = self.class_rates()
        for number in names.shown(self.counts).tolist():
            actual, predicted, right = self.counts[:, number].tolist()
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

    def class_rates(self) -> np.ndarray:
        """Return float64 [classes, 4], the RATE_COLUMNS of each class. Undefined rates are NaN."""
        num_images = len(self.indices)
        actual, predicted, right = self.counts.astype(np.float64)
        others = num_images - actual
        ranking = self.ranking or Ranking(*np.full((2, len(actual)), np.nan))
        with np.errstate(invalid="ignore"):
            specificity = (others - (predicted - right)) / others
            return np.stack([right / actual, specificity, ranking.auc, ranking.average_precision], axis=1)

    def most_taken_for(self) -> dict[int, tuple[int, int]]:
        """Return {class with mistakes: (its most frequent wrong prediction, count)}.

        The first prediction wins a tie.
        """
        mistakes: dict[int, tuple[int, int]] = {}
        labels, predictions, counts = self.cells()
        for label, prediction, count in zip(labels.tolist(), predictions.tolist(), counts.tolist(), strict=True):
            if label != prediction and count > mistakes.get(label, (0, 0))[1]:
                mistakes[label] = prediction, count
        return mistakes

    def confusion_rows(self, names: Names) -> tuple[Sequence[str], Iterable[Sequence]]:
        """Return the header and the rows of confusion.csv: a matrix, or a list of its cells."""
        labels, predictions, counts = self.cells()
        shown = names.shown(self.counts)
        if len(shown) > MOST_CLASSES:
            rows = zip(labels.tolist(), predictions.tolist(), counts.tolist(), strict=True)
            return CELL_COLUMNS, ((names[label], names[prediction], count) for label, prediction, count in rows)
        matrix = np.zeros((len(shown), len(shown)), np.int64)
        matrix[np.searchsorted(shown, labels), np.searchsorted(shown, predictions)] = counts
        titles = [names[number] for number in shown.tolist()]
        return (CORNER, *titles), ([title, *row] for title, row in zip(titles, matrix.tolist(), strict=True))


def with_groups(
    columns: Sequence[str], rows: Iterable[Sequence], indices: np.ndarray, image_set: ImageSet
) -> tuple[Sequence[str], Iterable[Sequence]]:
    """Return a table of images, with the number of each image's group as one more column if some are of one group."""
    if not image_set.is_grouped:
        return columns, rows
    from engine.evaluation.groups import groups_of

    groups = groups_of(image_set)
    if groups is None:
        return columns, rows
    return (*columns, GROUP), ((*row, number) for row, number in zip(rows, groups[indices].tolist(), strict=True))


def evenly(rows: np.ndarray, most: int) -> list[int]:
    """Return at most this many of the rows, at equal distances."""
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)].tolist()


def format_share(value: float) -> str:
    return f"{value:.6f}"
