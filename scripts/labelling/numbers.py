"""Finds doubtful numbers: those that differ most from what features predict from all other images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.features.number_doubts import NumberDoubts, judge_numbers
from engine.features.saved import features_by_name
from scripts.labelling.command import Source, features_by_weights, read_copies
from scripts.labelling.copies import Copy
from scripts.labelling.data import DataSet, refuse_other_data
from scripts.labelling.review import TABLE, Row, write_review
from utils.errors import ConfigError
from utils.text import counted, first_of


def find_numbers(source: Source, folder: Path, finds_copies: bool) -> None:
    """Find doubtful numbers in place of labels."""
    data = DataSet.load(source.config)
    if source.weights:
        features = features_by_weights(source, data)
    else:
        refuse_other_data(source.runs[0], data)
        features = features_of_run(source.runs[0].folder, data)
    write_numbers(folder, data, features, read_copies(data) if finds_copies else [])


def features_of_run(folder: Path, data: DataSet) -> np.ndarray:
    """Return float32 [N, D], which a run has kept from before its training; a row of NaN means that there are none."""
    features = features_by_name(folder, [data.name(number) for number in range(len(data))], print)
    if features is None:
        raise ConfigError(
            f"{folder}: this run kept no features of its images; judge the numbers by pretrained weights: "
            "python scripts/labels.py WEIGHTS -dataset csv -data_path ... -opts "
            f"TRAIN.OBJECTIVE={data.config.TRAIN.OBJECTIVE} DATA.COLUMNS=[...]"
        )
    return features


def write_numbers(folder: Path, data: DataSet, features: np.ndarray, copies: Sequence[Copy]) -> None:
    """Write labels.csv and labels.png with the doubtful numbers and the copies, and print a summary."""
    rows: list[Row] = []
    values = data.in_order(part.meaning.values[part.targets] for part in data.parts)  # NaN: missing
    for output, name in enumerate(data.classes):
        found = judge_numbers(values[:, output], features)
        rows += _rows_of(name, found)
        print(
            f"{name}: mean error {found.mean_error:.4g} on {counted(int(found.is_judged.sum()), 'image')}, predicted from the "
            f"others; {len(found.ranked):,} with the largest errors are listed"
        )
    rows += [Row(each.image, "", None, each.reason) for each in copies]
    sheets = write_review(folder, rows, data)
    print(f"equal or nearly equal images with other numbers, or in training and validation: {len(copies):,}")
    if rows:
        print(f"look at {first_of([str(each) for each in sheets], limit=3)} and {folder / TABLE}")
        print("correct the numbers in the CSV file of the data, and train again")


def _rows_of(name: str, found: NumberDoubts) -> list[Row]:
    """The confidence is the share of the images with smaller errors."""
    sizes = np.abs(found.errors[found.is_judged])
    return [
        Row(
            image,
            f"{name} {found.predicted[image]:.4g}",
            float((sizes < abs(found.errors[image])).mean()),
            f"the error is {found.errors[image]:+.4g}",
        )
        for image in found.ranked.tolist()
    ]
