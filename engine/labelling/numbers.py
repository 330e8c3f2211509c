"""Doubtful numbers: those that differ most from what the other images, or a run that held the image out, predict.

A ridge regression of the features predicts the number of each image from all others, as for labels
(engine/features/doubts.py). Copies are predicted together, from other images. If runs predict the images that they held
out better, they judge these.
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
from engine.labelling.data import Copy, DataSet, Source
from engine.labelling.predictions import in_order, read_numbers
from engine.labelling.review import Row
from utils.errors import ConfigError
from utils.text import counted, first_of

MOST_LISTED = 0.05  # share of the images that are listed at most
TIMES = 3.0  # the error of a doubtful number is more than this many times the median error


class NumberDoubts(NamedTuple):
    """The judgement of the numbers of one output: arrays [N]. NaN: not judged."""

    predicted: np.ndarray  # float64, from the other images or by a run that held the image out
    errors: np.ndarray  # the number minus the predicted one
    usual: np.ndarray  # the median of the absolute errors of those who predict this image
    judges: str = ""  # who predicts better, if there are two; for the summary

    @classmethod
    def of(cls, values: np.ndarray, predicted: np.ndarray) -> "NumberDoubts":
        errors = values - predicted
        known = np.isfinite(errors)
        usual = np.median(np.abs(errors[known])) if known.any() else np.nan
        return cls(predicted, errors, np.where(known, usual, np.nan))

    @property
    def is_judged(self) -> np.ndarray:
        return np.isfinite(self.errors)

    @property
    def mean_error(self) -> float:
        return self.mean_error_on(self.is_judged)

    def mean_error_on(self, chosen: np.ndarray) -> float:
        """Return the mean absolute error on the chosen images, bool [N]."""
        return float(np.abs(self.errors[chosen]).mean()) if chosen.any() else math.nan

    @property
    def sizes(self) -> np.ndarray:
        """Return the absolute errors in units of the usual ones; -1 where nothing was judged."""
        smallest = 1e-9 * max(1e-9, float(np.nanmax(np.abs(self.errors), initial=0)))
        return np.nan_to_num(np.abs(self.errors) / np.maximum(self.usual, smallest), nan=-1.0)

    @property
    def ranked(self) -> np.ndarray:
        """Return the numbers of the images with doubtful numbers, the largest error first."""
        order = np.argsort(-self.sizes, kind="stable")[: int(MOST_LISTED * self.is_judged.sum())]
        return order[self.sizes[order] > TIMES]


def judge_numbers(values: np.ndarray, features: np.ndarray) -> NumberDoubts:
    """Judge values [N], NaN where one is missing, by features [N, D], where a row of NaN means that there are none."""
    predicted = np.full(len(values), np.nan)
    rows = np.flatnonzero(np.isfinite(values) & np.isfinite(features).all(1))
    true = values[rows]
    if len(rows) < 2 or true.min() == true.max():
        return NumberDoubts.of(values, predicted)
    copies = group_copies(features[rows])
    if len(np.unique(copies)) < 2:
        return NumberDoubts.of(values, predicted)
    tried = predicted_without(features[rows], copies, torch.from_numpy(true)[:, None])
    of_images = (guesses[:, 0].numpy()[copies] for guesses in tried)
    predicted[rows] = min(of_images, key=lambda guesses: float(np.abs(guesses - true).mean()))
    return NumberDoubts.of(values, predicted)


def better_of(by_features: NumberDoubts, by_runs: NumberDoubts) -> NumberDoubts:
    """Return the better judgement. The runs judge only the images that they held out, and the features all others."""
    both = by_features.is_judged & by_runs.is_judged
    if not both.any():
        return by_runs if by_runs.is_judged.any() else by_features
    of_features, of_runs = (judge.mean_error_on(both) for judge in (by_features, by_runs))
    line = (
        f"on {counted(int(both.sum()), 'image')} that no model was trained on, the mean error of the trained model is "
        f"{of_runs:.4g}, that of the features from before the training {of_features:.4g}"
    )
    if of_runs >= of_features:
        return by_features._replace(judges=f"{line}; the features judge all images")
    chosen = by_runs.is_judged
    columns = (np.where(chosen, run, other) for run, other in zip(by_runs[:3], by_features[:3], strict=True))
    return NumberDoubts(*columns, f"{line}; the trained model judges these images")


@dataclass(frozen=True)
class JudgedNumbers:
    """The numbers of a data set, and how much each differs from its prediction."""

    data: DataSet
    doubts: dict[str, NumberDoubts]  # of each output
    folds: None = None

    @classmethod
    def of(cls, source: Source, say: Callable[[str], None]) -> "JudgedNumbers":
        data, features, predicted = _of_weights(source, say) if source.weights else _of_runs(source, say)
        values = data.in_order(part.meaning.values[part.targets] for part in data.parts)  # NaN: missing
        columns = zip(data.classes, values.T, predicted.T, strict=True)
        return cls(
            data,
            {
                name: better_of(judge_numbers(true, features), NumberDoubts.of(true, by_runs))
                for name, true, by_runs in columns
            },
        )

    def rows(self, copies: Sequence[Copy]) -> list[Row]:
        """Return a row for each doubtful number, and then for each copy."""
        rows = [row for name, doubts in self.doubts.items() for row in _rows_of(name, doubts)]
        return rows + [Row(each.image, "", None, each.reason) for each in copies]

    def summary(self, copies: Sequence[Copy] | None) -> list[str]:
        """Return the lines that summarize the findings."""
        lines = [
            f"{name}: mean error {doubts.mean_error:.4g} on {counted(int(doubts.is_judged.sum()), 'image')}, predicted "
            f"from the others; {len(doubts.ranked):,} with the largest errors are listed"
            for name, doubts in self.doubts.items()
        ]
        lines += [f"{name}: {doubts.judges}" for name, doubts in self.doubts.items() if doubts.judges]
        count = len(copies or ())
        return [*lines, f"equal or nearly equal images with other numbers, or in training and validation: {count:,}"]

    def advice(self, source: Source, num_rows: int, table: Path, sheets: Sequence[Path]) -> Iterator[str]:
        """Yield the lines that say what to do with the table and its sheets."""
        if num_rows:
            yield f"look at {first_of([str(each) for each in sheets], limit=3)} and {table}"
            yield "correct the numbers in the CSV file of the data, and train again"


def _of_weights(source: Source, say: Callable[[str], None]) -> tuple[DataSet, np.ndarray, np.ndarray]:
    """Return the data, their features [N, D], and predictions [N, outputs], which are all NaN."""
    data = source.data()
    return data, source.features(data, say), np.full((len(data), len(data.classes)), np.nan)


def _of_runs(source: Source, say: Callable[[str], None]) -> tuple[DataSet, np.ndarray, np.ndarray]:
    """Return the data, the features [N, D] that the first run kept, and predictions [N, outputs] of held-out images."""
    data, predicted = read_numbers(source)
    features = features_by_name(in_order(source.runs)[0].folder, data.names, say)
    is_predicted = np.isfinite(predicted).any(1)
    if features is None and not is_predicted.any():
        raise ConfigError(
            f"{source.runs[0].folder}: this run kept neither features nor predictions of its images; judge the numbers "
            "by pretrained weights: halfstep labels WEIGHTS -dataset csv -data_path ... -opts "
            f"TRAIN.OBJECTIVE={data.config.TRAIN.OBJECTIVE} DATA.COLUMNS=[...]"
        )
    if is_predicted.any() and not is_predicted.all() and data.is_divided and not source.folds:
        count = counted(int((~is_predicted).sum()), "image")
        say(
            f"the run was trained on {count}, so it does not judge them; "
            f"a run with -folds judges all: {source.by_folds}"
        )
    return data, np.full((len(data), 1), np.nan) if features is None else features, predicted


def _rows_of(name: str, doubts: NumberDoubts) -> list[Row]:
    """The confidence is the share of the images with smaller errors."""
    sizes = doubts.sizes[doubts.is_judged]
    return [
        Row(
            image,
            f"{name} {doubts.predicted[image]:.4g}",
            float((sizes < doubts.sizes[image]).mean()),
            f"the error is {doubts.errors[image]:+.4g}",
        )
        for image in doubts.ranked.tolist()
    ]
