"""Numbers as targets: standardized by the training images, and divided into strata for a split."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from configs.schema import SCALE, Config
from datasets.image_set import Table
from datasets.targets.by_label import ByName
from datasets.targets.label_sets import LabelSets
from datasets.targets.one_class import OneClass, count_classes
from datasets.types import PriorFacts, Settled
from utils.errors import DataError, ensure
from utils.text import counted, warning

# The strata of a column for a split, and the images in each of them, times the number of columns.
NUM_STRATA, FEWEST_IN_STRATUM = 10, 10
FEWEST_ROWS = 10  # from this many rows on, a column that counts them is noticed


class NumberTargets(OneClass):
    """An image has a number for each output, or NaN where it is missing. A target is a row of the table of numbers.

    Batches: float32 [B, outputs], standardized. They need mean and deviation, which only open_data adds.
    """

    has_one_name = near_copies_agree = False
    part_noun, part_nouns = "range of numbers", "ranges of numbers"

    def __init__(self, values: np.ndarray, scale: tuple[np.ndarray, np.ndarray] | None = None):
        """`values`: float64 [targets, outputs] in the units of the data; `scale`: mean and deviation of each output."""
        super().__init__(ByName())
        self.values, self._standards = values, scale

    @property
    def is_present(self) -> np.ndarray:
        """Return bool [targets, outputs]."""
        return ~np.isnan(self.values)

    @classmethod
    def invent(cls, num_classes: int) -> "NumberTargets":
        scale = np.zeros(num_classes), np.ones(num_classes)
        return cls(np.random.default_rng(0).standard_normal((num_classes, num_classes)), scale)

    def names(self, classes: Sequence[str]) -> Sequence[str]:
        return RowTexts(*self._by_name(classes))

    def content(self, classes: Sequence[str], targets: np.ndarray) -> Iterator[bytes | np.ndarray]:
        names, values = self._by_name(classes)
        yield "\0".join(names).encode(errors="surrogateescape")
        values = np.where(np.isnan(values), math.nan, values + 0.0)  # NaN and 0 have several representations
        for start in range(0, len(targets), 2**20):
            yield values[targets[start : start + 2**20]].astype("<f8")

    def _by_name(self, classes: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """Return the names and the columns [targets, outputs] of numbers, which do not depend on their order."""
        order = sorted(range(min(len(classes), self.values.shape[1])), key=lambda output: classes[output])
        return [classes[output] for output in order], self.values[:, order]

    def count(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        counts = count_classes(targets, len(self.values)) @ self.is_present.astype(np.int64)
        return np.pad(counts, (0, num_classes - len(counts)))

    def describe_counts(self, classes: Sequence[str], trained: np.ndarray, validation: np.ndarray) -> list[str]:
        return []

    def with_any(self, targets: np.ndarray, classes: np.ndarray) -> np.ndarray:
        return self.is_present[:, classes].any(1)[targets]

    def classes_of(self, target: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(~np.isnan(self.values[target])).tolist())

    def renumber(self, targets: np.ndarray, lookup: np.ndarray) -> tuple["NumberTargets", np.ndarray]:
        values = np.full((len(self.values), int(lookup.max()) + 1), np.nan)
        is_known = lookup >= 0
        values[:, lookup[is_known]] = self.values[:, is_known]
        return NumberTargets(values), targets

    with_named_classes, batch = LabelSets.with_named_classes, LabelSets.batch

    def allocate(self, count: int, num_classes: int, pinned: bool) -> Tensor:
        ensure(self._standards is not None, "these numbers have no mean and deviation yet, which open_data adds")
        return LabelSets.allocate(self, count, num_classes, pinned)

    def put(self, target: int, place: Tensor) -> None:
        mean, deviation = self._standards
        row = (self.values[target] - mean) / deviation
        place[: len(row)] = torch.from_numpy(row)
        place[len(row) :] = math.nan

    def describe(self, images: Table) -> list[str]:
        """Describe the numbers of each column, and warn of columns that only count the rows."""
        return [_describe_column(*each) for each in zip(images.classes, self.values[images.targets].T, strict=True)]

    def strata(self, image_set: Table) -> Table:
        """Return the images with labels in place of numbers: of each output, the tenth with similar numbers."""
        names, strata = [], np.empty(self.values.shape, np.int32)
        by_name = sorted((name, output) for output, name in enumerate(image_set.classes))  # in any order of columns
        for place, (name, output) in enumerate(by_name):
            values = self.values[:, output]
            of_images = np.sort(values[image_set.targets])
            of_images = of_images[~np.isnan(of_images)]
            number = min(NUM_STRATA, len(of_images) // (FEWEST_IN_STRATUM * len(by_name)))
            starts = np.unique(of_images[np.arange(1, number) * len(of_images) // max(number, 1)])
            places = np.searchsorted(starts, values, side="right")
            strata[:, place] = np.where(np.isnan(values), -1, len(names) + places)
            ends = [-math.inf, *starts.tolist(), math.inf]
            names += [f"{name} {low:g} to {high:g}" for low, high in zip(ends, ends[1:], strict=False)]
        return replace(image_set, meaning=Strata(strata), classes=names)

    def settle(
        self, config: Config, prior: PriorFacts, train: Table | None, val: Table
    ) -> tuple[list[Settled], Table | None, Table]:
        return standardized(config, prior, train, val)


class RowTexts(Sequence):
    """The numbers of each row of a table [rows, names] as text, made when it is read."""

    def __init__(self, names: Sequence[str], values: np.ndarray):
        self._names, self._values = names, values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> str:
        pairs = zip(self._names, self._values[row].tolist(), strict=True)
        return ", ".join(f"{name} {value!r}" for name, value in pairs if not math.isnan(value))


class Strata(LabelSets):
    """The ranges of numbers in which an image lies, as the classes of a split."""

    part_noun, part_nouns = NumberTargets.part_noun, NumberTargets.part_nouns

    def __init__(self, strata: np.ndarray):
        """`strata`: int [targets, outputs], the number of a range, or -1 where a number is missing."""
        numbers = np.zeros(len(strata), np.int64)
        for column in strata.T:  # sorting, as np.unique does, would take much longer
            # The strata of a column are NUM_STRATA consecutive numbers at most.
            keys = numbers * (NUM_STRATA + 1) + np.maximum(column - column.max(initial=0) + NUM_STRATA, 0)
            numbers = (np.cumsum(np.bincount(keys) > 0) - 1)[keys]
        examples = np.zeros(numbers.max(initial=-1) + 1, np.int64)  # a target with each set
        examples[numbers] = np.arange(len(numbers))
        super().__init__([tuple(number for number in row if number >= 0) for row in strata[examples].tolist()])
        self._numbers = numbers  # the number of the set of each target

    def count(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        return super().count(self._numbers[targets], num_classes)

    def with_any(self, targets: np.ndarray, classes: np.ndarray) -> np.ndarray:
        return super().with_any(self._numbers[targets], classes)

    def classes_of(self, target: int) -> tuple[int, ...]:
        return super().classes_of(self._numbers[target])


def _describe_column(name: str, column: np.ndarray) -> str:
    """`column`: float64 [N], NaN where a number is missing."""
    present = column[~np.isnan(column)]
    if not len(present):
        return warning(f"{name}: no image has a number")
    steps = np.diff(present)
    if len(present) >= FEWEST_ROWS and steps[0] and (steps == steps[0]).all():
        return warning(
            f"{name} counts the rows ({present[0]:g} to {present[-1]:g}); name another column in DATA.COLUMNS"
        )
    lacking = f", missing for {counted(len(column) - len(present), 'image')}" if len(present) < len(column) else ""
    return f"{name}: {present.min():g} to {present.max():g}, mean {present.mean():.4g}{lacking}"


# --- standardization ---


MEAN, DEVIATION = SCALE


def standardized(
    config: Config, prior: PriorFacts, train: Table | None, val: Table
) -> tuple[list[Settled], Table | None, Table]:
    """Return mean and deviation, and the images with targets that have mean 0 and deviation 1 in training.

    A resumed run keeps them, also if images were added. The numbers that the weights predict keep those of the weights.
    Those of other numbers are measured; without training images they are 0 and 1.
    """
    names = val.classes
    if not val.meaning.is_present[val.targets].any():
        raise DataError(
            f"DATA.DATA_PATH: no validation image has a number in {', '.join(names)}, so nothing can be scored; give "
            f"the validation images of {config.DATA.DATA_PATH} their numbers"
        )
    if config.MODEL.NUM_CLASSES not in (None, len(names)):
        raise DataError(
            f"MODEL.NUM_CLASSES is {config.MODEL.NUM_CLASSES}, but the data have {counted(len(names), 'number')} "
            f"({', '.join(names)}); leave it out"
        )
    train, val = (each and _with_columns(each, len(names)) for each in (train, val))
    scale, origin = (config.DATA.TARGET_MEAN, config.DATA.TARGET_STD), ""
    if not scale[0] and prior.began.get(MEAN):
        scale, origin = (prior.began[MEAN], prior.began[DEVIATION]), "the checkpoint"
    elif not scale[0]:
        of_names = _scale_of_weights(prior)
        if train is not None:
            of_names = dict(zip(names, zip(*mean_and_deviation(config, train), strict=True), strict=True)) | of_names
        if of_names:
            origin = "the training images" if train is not None else "the weights"
        scale = tuple(zip(*(of_names.get(name, (0.0, 1.0)) for name in names), strict=True))
    if len(scale[0]) != len(names):
        raise DataError(
            f"{MEAN} has {counted(len(scale[0]), 'number')}, but the data have {len(names)} "
            f"({', '.join(names)}); leave it and {DEVIATION} out"
        )
    arrays = np.array(scale[0]), np.array(scale[1])
    train, val = (_with_scale(image_set, arrays) for image_set in (train, val))
    pairs = zip((MEAN, DEVIATION), scale, strict=True) if origin else ()
    return [Settled(name, tuple(image_set), origin) for name, image_set in pairs], train, val


def _with_columns(images: Table, count: int) -> Table:
    """Return images with this number of columns. Those that the data lack have no numbers."""
    lacking = count - images.meaning.values.shape[1]
    if not lacking:
        return images
    values = np.pad(images.meaning.values, ((0, 0), (0, lacking)), constant_values=np.nan)
    return replace(images, meaning=NumberTargets(values))


def _scale_of_weights(prior: PriorFacts) -> dict[str, tuple[float, float]]:
    """Return {name: (mean, deviation)} of the numbers that weights of a run predict."""
    if not prior.trained.get(MEAN):  # they do not predict numbers
        return {}
    pairs = zip(prior.trained[MEAN], prior.trained[DEVIATION], strict=True)
    return dict(zip(prior.outputs, pairs, strict=False))


def _with_scale(image_set: Table | None, scale: tuple[np.ndarray, np.ndarray]) -> Table | None:
    if image_set is None:
        return None
    return replace(image_set, meaning=NumberTargets(image_set.meaning.values, scale))


def mean_and_deviation(config: Config, train: Table) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each column over the training images."""
    counts = count_classes(train.targets, len(train.meaning.values))
    means, deviations = [], []
    for name, column in zip(train.classes, train.meaning.values.T, strict=True):
        is_used = ~np.isnan(column) & (counts > 0)
        values, weights = column[is_used], counts[is_used]
        if not len(values) or values.min() == values.max():
            constant = f"the same {name}, {values[0]:g}" if len(values) else f"no number in {name}"
            raise DataError(
                f"DATA.DATA_PATH: all training images in {config.DATA.DATA_PATH} have {constant}, so there is nothing "
                "to learn; leave this column out (DATA.COLUMNS)"
            )
        mean = float(np.average(values, weights=weights))
        means.append(mean)
        deviations.append(float(np.sqrt(np.average((values - mean) ** 2, weights=weights))))
    return tuple(means), tuple(deviations)
