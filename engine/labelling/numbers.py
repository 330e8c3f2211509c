"""Doubtful numbers: those that differ most from what the features of all other images predict.

A ridge regression predicts the number of each image, as for labels (engine/features/doubts.py). Copies are predicted
together, from other images.
How many numbers are wrong cannot be said: the errors of right numbers have no known distribution.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.features.doubts import group_copies, predicted_without
from engine.features.saved import features_by_name
from engine.labelling.data import Copy, DataSet, Source, refuse_other_data
from engine.labelling.review import Row
from utils.errors import ConfigError
from utils.text import counted, first_of

MOST_LISTED = 0.05  # share of the images that are listed at most
TIMES = 3.0  # the error of a doubtful number is more than this many times the median error


class NumberDoubts(NamedTuple):
    """The judgement of the numbers of one output: arrays [N]. NaN: not judged."""

    predicted: np.ndarray  # float64, from the other images
    errors: np.ndarray  # the number minus the predicted one

    @property
    def is_judged(self) -> np.ndarray:
        return np.isfinite(self.errors)

    @property
    def mean_error(self) -> float:
        return float(np.nanmean(np.abs(self.errors))) if self.is_judged.any() else math.nan

    @property
    def ranked(self) -> np.ndarray:
        """Return the numbers of the images with doubtful numbers, the largest error first."""
        sizes = np.nan_to_num(np.abs(self.errors), nan=-1.0)
        order = np.argsort(-sizes, kind="stable")[: int(MOST_LISTED * self.is_judged.sum())]
        return order[sizes[order] > TIMES * np.median(sizes[self.is_judged])] if len(order) else order


def judge_numbers(values: np.ndarray, features: np.ndarray) -> NumberDoubts:
    """Judge values [N], NaN where one is missing, by features [N, D], where a row of NaN means that there are none."""
    found = NumberDoubts(np.full(len(values), np.nan), np.full(len(values), np.nan))
    rows = np.flatnonzero(np.isfinite(values) & np.isfinite(features).all(1))
    true = values[rows]
    if len(rows) < 2 or true.min() == true.max():
        return found
    copies = group_copies(features[rows])
    if len(np.unique(copies)) < 2:
        return found
    tried = predicted_without(features[rows], copies, torch.from_numpy(true)[:, None])
    of_images = (each[:, 0].numpy()[copies] for each in tried)
    found.predicted[rows] = min(of_images, key=lambda each: float(np.abs(each - true).mean()))
    found.errors[rows] = true - found.predicted[rows]
    return found


@dataclass(frozen=True)
class JudgedNumbers:
    """The numbers of a data set, and how much each differs from its prediction."""

    data: DataSet
    doubts: dict[str, NumberDoubts]  # of each output
    folds: None = None

    @classmethod
    def of(cls, source: Source, say: Callable[[str], None]) -> "JudgedNumbers":
        data = DataSet.load(source.config)
        if source.weights:
            features = source.features(data, say)
        else:
            refuse_other_data(source.runs[0], data)
            features = features_by_name(source.runs[0].folder, data.names, say)
        if features is None:
            raise ConfigError(
                f"{source.runs[0].folder}: this run kept no features of its images; judge the numbers by pretrained weights: "
                "python scripts/labels.py WEIGHTS -dataset csv -data_path ... -opts "
                f"TRAIN.OBJECTIVE={data.config.TRAIN.OBJECTIVE} DATA.COLUMNS=[...]"
            )
        values = data.in_order(part.meaning.values[part.targets] for part in data.parts)  # NaN: missing
        columns = zip(data.classes, values.T, strict=True)
        return cls(data, {name: judge_numbers(each, features) for name, each in columns})

    def rows(self, copies: Sequence[Copy]) -> list[Row]:
        """Return a row for each doubtful number, and then for each copy."""
        rows = [row for name, found in self.doubts.items() for row in _rows_of(name, found)]
        return rows + [Row(each.image, "", None, each.reason) for each in copies]

    def summary(self, copies: Sequence[Copy] | None) -> list[str]:
        """Return the lines that summarize the findings."""
        lines = [
            f"{name}: mean error {found.mean_error:.4g} on {counted(int(found.is_judged.sum()), 'image')}, predicted from the "
            f"others; {len(found.ranked):,} with the largest errors are listed"
            for name, found in self.doubts.items()
        ]
        count = len(copies or ())
        return [*lines, f"equal or nearly equal images with other numbers, or in training and validation: {count:,}"]

    def advice(self, source: Source, num_rows: int, table: Path, sheets: Sequence[Path]) -> Iterator[str]:
        """Yield the lines that say what to do with the table and its sheets."""
        if num_rows:
            yield f"look at {first_of([str(each) for each in sheets], limit=3)} and {table}"
            yield "correct the numbers in the CSV file of the data, and train again"


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
