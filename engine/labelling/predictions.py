"""The predictions of finished runs for their held-out images (predictions.csv)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.labelling.data import DataSet, Source, cell_of, config_of, refuse_other_data
from engine.record.saved_files import read_table, to_number
from engine.record.saved_run import SavedRun
from engine.tasks.class_tables import PREDICTION_COLUMNS, PREDICTIONS
from engine.tasks.number_figures import PREDICTED
from utils.errors import ConfigError, DataError
from utils.text import first_of

RECORD = "results.json"
UNKNOWN = -1  # class number of a prediction that is not a class of the data set


class Predictions(NamedTuple):
    """Predictions for held-out images, each image once. One table holds all folds of one seed."""

    images: np.ndarray  # int64 [n]: numbers of the images in the data set
    predicted: np.ndarray  # int64 [n]: class numbers
    probabilities: np.ndarray  # float64 [n]: probability of the predicted class
    of_labels: np.ndarray  # float64 [n]: probability of the image's label


def probabilities_of(tables: Sequence[Predictions], labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return [N, C]: the mean probabilities of the tables that judge an image, or NaN.

    A table has only the probabilities of the prediction and of the label. The other classes share the rest equally.
    """
    total, counts = np.zeros((len(labels), num_classes)), np.zeros((len(labels), 1))
    for images, predicted, probabilities, of_labels in tables:
        rows, own = np.arange(len(images)), labels[images]
        known = np.full((len(images), num_classes), np.nan)
        is_class = predicted != UNKNOWN
        known[rows[is_class], predicted[is_class]] = probabilities[is_class]
        known[rows, own] = of_labels
        rest = np.maximum(1 - np.nansum(known, 1), 0) / np.maximum(np.isnan(known).sum(1), 1)
        np.add.at(total, images, np.where(np.isnan(known), rest[:, None], known))
        np.add.at(counts, images, 1)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)


def table_of(run: SavedRun) -> list[dict[str, str]]:
    """Return the rows of the table of predictions, or [] if the run has not written all of them."""
    return read_table(run.folder / PREDICTIONS) if (run.folder / RECORD).exists() else []


def numbered(rows: list[dict[str, str]], run: SavedRun, data: DataSet) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of the image of each row of the run's table, and the row."""
    numbers_of: dict[str, list[int]] = defaultdict(list)
    for number in range(len(data)) if data.is_divided else data.numbers[1].tolist():
        numbers_of[cell_of(data.name(number))].append(number)
    for row in rows:
        numbers = numbers_of.get(row["image"])
        if not numbers:
            raise DataError(
                f"{run.folder / PREDICTIONS}: {row['image']} is not in {data.place}; "
                "give the run's data with -data_path"
            )
        # A list can name an image twice.
        yield numbers.pop(0) if len(numbers) > 1 else numbers[0], row


def read_predictions(run: SavedRun, data: DataSet) -> Predictions:
    """Read the predictions of a run for its held-out images."""
    rows = table_of(run)
    if not rows and run.settings["REPORT"] and run.state != "done":
        raise ConfigError(
            f"{run.folder}: the run is not finished (its state is: {run.state}), and it writes {PREDICTIONS} when it "
            f"ends; wait for its end, or continue it with -resume {run.folder}"
        )
    if not rows and run.run_facts.get("validation_images") == 0:
        raise ConfigError(
            f"{run.folder}: the run was trained on all images (DATA.VAL_FRACTION is 0), so it judges none; train with "
            "-folds 5, whose further runs judge all, or give pretrained weights and -data_path"
        )
    if not rows:
        raise ConfigError(
            f"{run.folder}: it has no complete {PREDICTIONS}; train the run again with REPORT=true, which writes this "
            "table"
        )
    if missing := [name for name in PREDICTION_COLUMNS if name not in rows[0]]:
        raise ConfigError(
            f"{run.folder / PREDICTIONS}: it lacks the column {first_of(missing)}; restore the file, or "
            "train the run again"
        )
    classes = {cell_of(name): n for n, name in enumerate(data.classes)}
    images, predicted, probabilities, of_labels = [], [], [], []
    for number, row in numbered(rows, run, data):
        values = to_number(row["probability"]), to_number(row["label_probability"])
        if row["label"] != cell_of(data.label(number)) or None in values:
            raise DataError(
                f"{run.folder / PREDICTIONS}: the label of {row['image']} is {row['label']}, but "
                f"{data.label(number)} in {data.place}; train again on the data as they are"
            )
        images.append(number)
        predicted.append(classes.get(row["prediction"], UNKNOWN))
        probabilities.append(values[0])
        of_labels.append(values[1])
    numbers = (np.array(each, np.int64) for each in (images, predicted))
    return Predictions(*numbers, np.array(probabilities), np.array(of_labels))


def in_order(runs: Sequence[SavedRun]) -> list[SavedRun]:
    return sorted(runs, key=lambda run: str(run.settings["DATA.FOLD"]))


def open_runs(source: Source) -> Iterator[tuple[SavedRun, DataSet]]:
    """Yield the runs in the order of their folds, and the data as each has divided them."""
    data = None
    for run in in_order(source.runs):
        config = config_of(run, source.data_path)
        if data is None or config.DATA.FOLD != data.config.DATA.FOLD:  # each fold splits the images differently
            data = DataSet.load(config, run)
        refuse_other_data(run, data)
        yield run, data


def read_tables(source: Source) -> tuple[DataSet, list[Predictions], np.ndarray | None]:
    """Return the data, one table of predictions for each seed, and the fold of each image in a sweep (-1: unknown)."""
    first = folds = None
    by_seed: dict[int, list[Predictions]] = {}
    for run, data in open_runs(source):
        first = first or data
        table = read_predictions(run, data)
        by_seed.setdefault(run.settings["SEED"], []).append(table)
        if source.folds:
            folds = np.full(len(data), -1) if folds is None else folds
            folds[data.numbers[1]] = data.config.DATA.fold.number
        elif data.config.DATA.FOLDS:
            folds = data.train.folds
    joined = [Predictions(*map(np.concatenate, zip(*tables, strict=True))) for tables in by_seed.values()]
    return first, joined, folds


def read_numbers(source: Source) -> tuple[DataSet, np.ndarray]:
    """Return the data, and the mean of the numbers that the runs predict, float64 [N, outputs].

    NaN: no run has held the image out, or its run kept no predictions.
    """
    first, tables = None, []
    for run, data in open_runs(source):
        first = first or data
        table = np.full((len(data), len(data.classes)), np.nan)
        columns = [cell_of(f"{name}{PREDICTED}") for name in data.classes]
        for number, row in numbered(table_of(run), run, data):
            table[number] = [to_number(row.get(column, "")) for column in columns]
        tables.append(table)
    known = np.isfinite(tables)
    return first, np.where(known, tables, 0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)
