"""The task of runs whose images have numbers, such as an age: regression."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from configs.tables import METRICS
from datasets import ImageSet, Mixed
from engine.evaluation.all_scores import AllScores
from engine.evaluation.scores import Scores, format_value
from engine.evaluation.tally import Tally, joined
from engine.features.linear import FEATURES_OF_AN_OUTPUT, LinearClassifier, fit_ridge
from engine.precision import widen
from engine.tasks.class_tables import PREDICTIONS, with_groups
from engine.tasks.number_figures import (
    ENDS,
    FIGURES,
    PREDICTED,
    Interval,
    columns_of,
    decimals_of,
    grouped_half_widths,
    half_widths,
    measure_errors,
    plain,
    shares_of_images,
)
from engine.tasks.number_limits import groups_and_limits
from engine.tasks.task import Task
from engine.train.loss import build_loss
from models.units import Scale
from utils.distributed import Process
from utils.errors import ensure
from utils.log import Log
from utils.text import counted, plural

PER_OUTPUT, PER_OUTPUT_KEY = "per_output.csv", "per_output"
SHARE = 0.9  # of the images whose numbers lie in the intervals of halfstep predict
FEW_GROUPS = 10  # with fewer, the intervals of single splits had 78 to 100% (BENCHMARKS.md, "Numbers")


class NumberTask(Task):
    """An image has one number for each output of the model; outputs are standardized like the targets."""

    answers_are = "numbers"
    why_no_shards = "this script writes classes, not numbers; leave TRAIN.OBJECTIVE=numbers out"
    why_not_applied = "correct numbers in the CSV file of the data itself, and train again"
    # The largest allowed difference between a number of a graph and the model's, in standard deviations.
    most_difference = 0.02

    def __init__(self, config: Config):
        super().__init__(config)
        self.scale = Scale.of(config)
        self.mean, self.deviation = map(np.array, self.scale or (0.0, 1.0))

    def in_units(self, numbers: np.ndarray) -> np.ndarray:
        """Return standardized numbers [N, outputs] in the units of the data."""
        return numbers * self.deviation + self.mean

    def fit_head(self, features: Tensor, targets: Tensor, num_outputs: int) -> LinearClassifier:
        return fit_ridge(features, targets)

    def why_no_fit(self, targets: Tensor, names: Sequence[str]) -> str:
        first, is_lacking = max(enumerate(targets.isnan().all(0).tolist()), key=lambda pair: pair[1])
        return f"no image that can be read has a number in {names[first]}" if is_lacking else ""

    def fits(self, images: ImageSet, num_outputs: int, rank: int) -> tuple[int, str]:
        patterns = len(np.unique(images.meaning.is_present, axis=1).T)  # each is decomposed
        of_patterns = f" with {counted(patterns, 'pattern')} of missing ones" if patterns > 1 else ""
        outputs = counted(num_outputs, self.config.task.noun)
        return num_outputs + patterns * rank // FEATURES_OF_AN_OUTPUT, outputs + of_patterns

    @property
    def tally(self) -> "partial[NumberTally]":
        return partial(NumberTally, self)

    def calibrate(self, scores: tuple[np.ndarray, ...]) -> dict[str, Any]:
        """Return half the width of the interval that has the true number with a probability of SHARE, for each number.

        Split conformal prediction: the images must be exchangeable, and the weights must not depend on them. With
        DATA.GROUP_BY the groups must be exchangeable; `scores` then also has the number of each image's group.
        """
        outputs, targets, *groups = scores
        errors, of_groups = np.abs(outputs - targets).astype(np.float64) * self.deviation, {}  # in the data's units
        widths = grouped_half_widths(errors, SHARE, *groups) if groups else half_widths(errors, SHARE)
        images = counted(len(outputs), "validation image")
        if groups:
            of_groups = {"num_groups": len(np.unique(groups[0]))}
            images += f" of {counted(of_groups['num_groups'], 'group')}"
        if all(width is None for width in widths):
            return {"reason": f"{images} are too few for an interval of {SHARE:.0%}"}
        facts = {"interval": widths, "share": SHARE, "num_images": len(outputs)} | of_groups
        facts["chose_weights"] = self.config.compares_weights
        return {**facts, "figures": facts}

    def groups_and_limits(self, train: ImageSet, val: ImageSet) -> tuple[np.ndarray | None, dict[str, Any]]:
        return groups_and_limits(self.config, train, val)

    def describe_answers(self, calibration: dict[str, Any]) -> str:
        if "interval" not in calibration:
            return ""
        text = f"the intervals have the true number with a probability of {calibration['share']:.0%}"
        images = counted(calibration["num_images"], "validation image")
        if "num_groups" in calibration:
            text = f"{text} for images of new groups (DATA.GROUP_BY), by {calibration['num_groups']} groups"
            rough = "; so few groups show it only roughly" if calibration["num_groups"] < FEW_GROUPS else ""
            chose = "; these also chose the weights" if calibration["chose_weights"] else ""
            return f"{text} with {images}{rough}{chose}"
        if calibration["chose_weights"]:
            return f"{text} for images like the {images}; these also chose the weights, so it may be a little less"
        return f"{text}, by {images}"

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the numbers in the units of the data."""
        if not self.scale:
            return outputs
        return self.scale.in_units(outputs)

    def answers(self, numbers: Tensor, most: int | None) -> list[list[tuple[int, float]]]:
        """Return (number of an output, its value) for all outputs."""
        return [[*enumerate(row)] for row in numbers.tolist()]

    def answer(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def truth(self, images: ImageSet, index: int) -> np.ndarray:
        return images.meaning.values[images.targets[index]]

    def cost(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return how much the numbers differ, in standard deviations."""
        return np.abs(after - before) / self.deviation

    def difference(self, before: np.ndarray, after: np.ndarray) -> float:
        return float(self.cost(before, after).max())

    def captions(self, targets: Any, names: Sequence[str]) -> list[str]:
        if isinstance(targets, Mixed):
            targets = torch.lerp(targets.second, targets.first, targets.share[:, None])
        rows = self.in_units(targets.double().numpy())
        rows[np.abs(rows) < 1e-6 * self.deviation] = 0  # not -2e-9, because the targets have the precision of float32
        return [describe_row(zip(names, row, strict=False)) for row in rows.tolist()]


def describe_row(row: Iterable[tuple[str, float]]) -> str:
    """Return the numbers of an image with their names; missing ones are left out."""
    return ", ".join(f"{name} {value:.4g}" for name, value in row if not math.isnan(value)) or "no number"


# --- the results of images ---


@dataclass(frozen=True)
class NumberResults:
    """The numbers of each readable image, in the units of the data: float64 [N, outputs]."""

    indices: np.ndarray
    predicted: np.ndarray
    true: np.ndarray  # NaN: missing
    task: NumberTask
    local: Any  # this process's results
    groups: np.ndarray | None = None  # the group of each of these images
    is_complete, has_matrix = True, False

    def complete(self, process: Process, log: Log, should_stop: Any = None) -> "NumberResults":
        """There is nothing to add at the end of a run."""
        return self

    @cached_property
    def measured(self) -> list[dict[str, Interval]]:
        """Return the figures of each output."""
        means = np.broadcast_to(self.task.mean, self.true.shape[1:])
        columns = zip(self.true.T, self.predicted.T, means.tolist(), strict=True)
        return [measure_errors(*each, self.groups) for each in columns]

    def tables(self, image_set: ImageSet) -> Iterator[tuple[str, Sequence[str], Iterable[Sequence]]]:
        """Yield name, header and rows of each table."""
        names = image_set.classes
        columns = [column for name in names for column in (name, f"{name}{PREDICTED}")]
        yield PREDICTIONS, *with_groups(("image", *columns), self._rows(image_set), self.indices, image_set)
        others = [name for name in self.measured[0] if name not in FIGURES]
        titles, rows = [*(f"{name}{end}" for name in FIGURES for end in ENDS), *others], []
        for name, figures, true in zip(names, self.measured, self.true.T, strict=False):
            values = columns_of(figures)
            rows.append((name, int((~np.isnan(true)).sum()), *(plain(values[title]) for title in titles)))
        yield PER_OUTPUT, ("output", "images", *titles), rows

    def _rows(self, image_set: ImageSet) -> Iterator[list[float | str]]:
        exact = image_set.meaning.values  # `true` has the precision of float32
        widths = np.broadcast_to(self.task.deviation, self.predicted.shape[1:])
        columns = zip(self.predicted.T, widths.tolist(), strict=True)
        rounded = np.stack([np.round(column, decimals_of(width, 6)) for column, width in columns], axis=1)
        for index, predicted in zip(self.indices.tolist(), rounded.tolist(), strict=True):
            true = exact[image_set.targets[index]].tolist()
            cells = (["" if math.isnan(value) else value for value in row] for row in (true, predicted))
            pairs = zip(*cells, strict=False)
            yield [image_set.table_name(index), *(cell for pair in pairs for cell in pair)]

    def figures(self, image_set: ImageSet) -> dict[str, Any]:
        """Return {output: {figure: value}} for results.json."""
        rows = zip(image_set.classes, self.measured, strict=False)
        return {PER_OUTPUT_KEY: {name: {key: each.record for key, each in measured.items()} for name, measured in rows}}

    def errors(self, classes: Sequence[str], most: int) -> tuple[int, list[tuple[int, list[str]]]]:
        """Return the number of images, and (image index, caption) of those with the largest errors."""
        sizes = np.nan_to_num(self.task.cost(self.predicted, self.true), nan=-1.0)
        outputs, worst = sizes.argmax(1), np.argsort(-sizes.max(1), kind="stable")[:most].tolist()
        rows = [(row, int(outputs[row])) for row in worst if sizes[row].max() >= 0]
        return len(self.indices), [
            (int(self.indices[row]), self._caption(row, output, classes)) for row, output in rows
        ]

    def right(self, classes: Sequence[str], most: int) -> list[tuple[int, list[str]]]:
        """Return (image index, caption) of the images whose errors are closest to the median error."""
        captions = self.errors(classes, len(self.indices))[1]
        start = max(0, (len(captions) - most) // 2)
        return captions[start : start + most]

    def scores_of_images(self, metric: str, process: Process) -> np.ndarray | None:
        """Return a value for each image, whose mean is the metric, or None if there are no such values."""
        if metric not in ("mae", "rmse", "r2"):
            return None
        is_missing = np.isnan(self.true)
        with np.errstate(all="ignore"):  # the outputs of a model that has diverged
            values = np.abs(self.predicted - self.true).astype(np.float64)
            squares = np.where(is_missing, 0, values**2).sum(0) / np.maximum((~is_missing).sum(0), 1)
            if metric == "rmse":  # how much it changes with the weight of the image
                values = (squares + values**2) / np.where(squares > 0, 2 * np.sqrt(squares), 1)
            if metric == "r2":
                spread = np.nanvar(self.true, axis=0)
                values = 1 - values**2 / spread
                is_missing = is_missing | ~(spread > 0)  # without a spread, an output has no R2
        return shares_of_images(np.where(is_missing, np.nan, np.nan_to_num(values, nan=np.inf)))

    def _caption(self, row: int, output: int, classes: Sequence[str]) -> list[str]:
        name = classes[output] if output < len(classes) else f"number {output}"
        return [f"{name}: {self.true[row, output]:.4g}", f"model: {self.predicted[row, output]:.4g}"]

    def title_of_errors(self, number: int, shown: int) -> str:
        return f"the {counted(shown, 'image')} of {number:,} whose {plural(self.task.config.task.noun)} differ most"


class NumbersPerImage:
    """The outputs and the targets of the images of this process."""

    def __init__(self, task: NumberTask):
        self._task, self.scores, self.features = task, AllScores(), []
        self.indices = np.zeros(0, np.int64)  # set at the end of the evaluation
        self.groups: np.ndarray | None = None  # the group of each image of the set, set there too

    def gather(self, process: Process) -> NumberResults:
        """Return the results of all processes in each process. Collective."""
        outputs, targets = self.scores.on_host()
        ensure(len(outputs) == len(self.indices), f"there are {len(outputs)} results for {len(self.indices)} images")
        indices, *both = joined(process, self.indices, outputs, targets)
        groups = None if self.groups is None else self.groups[indices]
        in_units = (self._task.in_units(each.astype(np.float64)) for each in both)
        return NumberResults(indices, *in_units, self._task, self, groups)


# --- the scores ---


@dataclass(frozen=True)
class NumberScores(Scores):
    """The means over the outputs. Accuracies are NaN. The intervals are at least as wide as 95% intervals."""

    mae: float = math.nan
    rmse: float = math.nan
    r2: float = math.nan
    spearman: float = math.nan
    mae_low: float = math.nan
    mae_high: float = math.nan
    mae_of_mean: float = math.nan  # of predictions that are always the mean of the training images

    def figures(self) -> dict[str, float]:
        return {key: value for key, value in super().figures().items() if math.isfinite(value)}

    def describe(self, name: str) -> str:
        return ", ".join([f"{name} Loss: {self.loss:.4f}", *(f"{name} {text}" for text in self.texts())])

    def describe_all(self, name: str, classes: str) -> str:
        mae, *others = self.texts()
        low, high, of_mean = (format_value("mae", each) for each in (self.mae_low, self.mae_high, self.mae_of_mean))
        return (
            f"{name}{mae} (95%: {low} to {high}; predicting the mean: {of_mean}), {', '.join(others)}, "
            f"loss {self.loss:.4f} of {counted(self.num_images, 'image')}, {classes}{self._excluded()}"
        )

    def texts(self) -> list[str]:
        """Return each score with its name."""
        return [f"{METRICS[name].title} {format_value(name, value)}" for name, value in self.more().items()]


class NumberTally(Tally):
    """Keeps the outputs and targets of all images, and adds up the loss."""

    def __init__(self, task: NumberTask, device: torch.device, dtype: torch.dtype, num_images: int):
        self._loss, self.per_image = build_loss(task.config), NumbersPerImage(task)
        self._sums = torch.zeros(3, dtype=dtype, device=device)  # loss, images, unreadable images

    def add(self, outputs: Tensor, targets: Tensor, num_excluded: int) -> None:
        outputs = widen(outputs[: len(targets)])
        self.per_image.scores.add(outputs, targets)
        self._sums[0] += self._loss.of_images(outputs, targets).to(self._sums).sum()
        self._sums[1] += len(targets)
        self._sums[2] += num_excluded

    def result(self, process: Process) -> NumberScores:
        loss, count, excluded = process.sum(self._sums).tolist()
        results = self.per_image.gather(process)
        measured, is_finite = results.measured, np.isfinite(results.predicted).all()
        rows, names = [columns_of(each) for each in measured], {each.name for each in fields(NumberScores)}
        means = {name: mean_of(row[name] for row in rows) for name in rows[0] if name in names}
        counts = {"num_images": int(count), "num_excluded": int(excluded)}
        if results.groups is not None:
            counts["num_groups"] = len(np.unique(results.groups))
        if not is_finite:  # the mean of the other outputs would hide it
            means = dict.fromkeys(means, math.nan)
        return NumberScores(loss / max(count, 1), top1=math.nan, top5=math.nan, **counts, **means)


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of the values that are defined, or NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
