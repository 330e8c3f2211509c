"""Finds doubtful numbers: those that differ most from what features predict from all other images."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from engine.features.number_doubts import NumberDoubts, judge_numbers
from engine.features.saved import features_by_name
from scripts.labelling.copies import Copy
from scripts.labelling.data import DataSet
from scripts.labelling.review import TABLE, Row, write_review
from utils.errors import ConfigError
from utils.text import counted, first_of


class NumberData(DataSet):
    """All images of a data set with numbers."""

    @cached_property
    def values(self) -> np.ndarray:
        """Return float64 [N, outputs]: the numbers of each image, NaN where one is missing."""
        return self.in_order(part.meaning.values[part.targets] for part in self.parts)

    def label(self, number: int) -> str:
        part, index = self.find(number)
        return self._texts[int(part is self.val)][part.targets[index]]

    @cached_property
    def _texts(self) -> list[Sequence[str]]:
        """Return the numbers of each target of both parts as text. Different numbers have different texts."""
        return [part.target_names() for part in self.parts]


def features_of_run(folder: Path, data: DataSet) -> np.ndarray:
    """Return float32 [N, D], which a run has kept from before its training; a row of NaN means that there are none."""
    features = features_by_name(folder, [data.name(number) for number in range(len(data))], print)
    if features is None:
        raise ConfigError(
            f"{folder}: this run kept no features of its images; judge the numbers by pretrained weights: "
            "python scripts/labels.py WEIGHTS -dataset csv -data_path ... -opts TRAIN.OBJECTIVE=numbers DATA.COLUMNS=[...]"
        )
    return features


def write_numbers(folder: Path, data: NumberData, features: np.ndarray, copies: Sequence[Copy]) -> None:
    """Write labels.csv and labels.png with the doubtful numbers and the copies, and print a summary."""
    rows: list[Row] = []
    for output, name in enumerate(data.classes):
        found = judge_numbers(data.values[:, output], features)
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
