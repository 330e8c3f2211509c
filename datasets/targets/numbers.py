"""NumberTargets: numbers as targets, standardized by the training images, and divided into strata for a split."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from configs.schema import SCALE, Config
from datasets.image_set import Table
from datasets.sources.tar import Member, Tar
from datasets.targets.class_labels import OneLabel
from datasets.targets.label_sets import LabelSets
from datasets.targets.labels import (
    NAME_COLUMNS,
    USUAL_COLUMNS,
    Labels,
    ParquetColumns,
    RawLabels,
    RawSamples,
    Targets,
    label_names,
    shortened,
)
from datasets.targets.one_class import count_classes
from datasets.types import PriorFacts, Settled
from utils.errors import DataError, ensure
from utils.text import counted, warning

MISSING = ("", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")  # how programs write a number that is missing
LARGEST = 1e30  # larger numbers would overflow in float32
# The strata of a column for a split, and the images in each of them, times the number of columns.
NUM_STRATA, FEWEST_IN_STRATUM = 10, 10
FEWEST_ROWS = 10  # from this many rows on, a column that counts them is noticed
MEAN, DEVIATION = SCALE


@dataclass(frozen=True, eq=False)
class NumberTargets(OneLabel):
    """An image has a number for each output, or NaN where it is missing. A target is a row of the table of numbers.

    Batches: float32 [B, outputs], standardized. They need mean and deviation, which only open_data adds.
    """

    values: np.ndarray  # float64 [targets, outputs] in the units of the data
    scale: tuple[np.ndarray, np.ndarray] | None = None  # mean and deviation of each output
    labels_are: Literal["names"] = field(default="names", kw_only=True)  # the outputs have names

    has_one_name = near_copies_agree = False
    part_noun, part_nouns = "range of numbers", "ranges of numbers"
    stored, has_columns = "<f8", True

    # --- reading ---

    @classmethod
    def choose_columns(
        cls, config: Config, file: Path, schema: Any, first: Any, images: tuple[str, str | None] | None
    ) -> ParquetColumns:
        if images is None:
            name = (config.DATA.COLUMNS or USUAL_COLUMNS)[0]
            raise DataError(f"{file}: {name} is no column of images; {NAME_COLUMNS}")
        names = label_names(config)
        if names == ["*"]:
            names = _numeric_columns(first)
        if missing := [name for name in names if name not in schema.names]:
            known = ", ".join(schema.names)
            raise DataError(f"{file}: there is no column {missing[0]} among {known}; name the columns in DATA.COLUMNS")
        return ParquetColumns(*images, tuple(names))

    @classmethod
    def parse(cls, config: Config, raw: RawLabels) -> np.ndarray:
        """Return float64 [rows, outputs]."""
        numbers = np.empty((len(raw.rows), len(raw.names)))
        for place, (name, column) in enumerate(zip(raw.names, raw.columns, strict=True)):
            is_text = isinstance(column, list)
            numbers[:, place] = _from_texts(raw, name, column) if is_text else _from_arrow(raw, name, column)
        return numbers

    @classmethod
    def parse_tar(cls, raw: RawSamples) -> np.ndarray:
        """Return float64 [images, outputs]. A sample has numbers in its .json file, or otherwise in its .cls file."""
        rows = []
        for sample, image in raw.images.items():
            ending = next((ending for ending in ("json", "cls") if sample in raw.files[ending]), None)
            if ending is None:
                raise DataError(
                    f"{raw.tar.title}: the sample {image.name!r} has no numbers (.json or .cls); complete or remove it"
                )
            rows.append(_numbers_in(raw.tar, raw.files[ending][sample], ending, raw.names))
        return np.array(rows, np.float64).reshape(-1, len(raw.names))

    @classmethod
    def of_labels(cls, config: Config, parts: Sequence[Labels]) -> list[Targets]:
        names = list(parts[0].names)
        _refuse_names(names)
        tables = [part.values.reshape(-1, len(names)) for part in parts]
        return [Targets(np.arange(len(values), dtype=np.int32), names, cls(values)) for values in tables]

    @classmethod
    def invent(cls, num_classes: int) -> "NumberTargets":
        scale = np.zeros(num_classes), np.ones(num_classes)
        return cls(np.random.default_rng(0).standard_normal((num_classes, num_classes)), scale)

    # --- meaning ---

    @property
    def is_present(self) -> np.ndarray:
        """Return bool [targets, outputs]."""
        return ~np.isnan(self.values)

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
        return replace(self, values=values), targets

    def allocate(self, count: int, num_classes: int, pinned: bool) -> Tensor:
        ensure(self.scale is not None, "these numbers have no mean and deviation yet, which open_data adds")
        return LabelSets.allocate(self, count, num_classes, pinned)

    def put(self, target: int, place: Tensor) -> None:
        mean, deviation = self.scale
        row = (self.values[target] - mean) / deviation
        place[: len(row)] = torch.from_numpy(row)
        place[len(row) :] = math.nan

    def describe(self, config: Config, images: Table) -> list[str]:
        """Describe the numbers of each column, and warn of columns that only count the rows."""
        columns = self.values[images.targets].T
        return [_describe_column(name, column) for name, column in zip(images.classes, columns, strict=True)]

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
        return replace(image_set, meaning=Strata.of(strata), classes=names)

    def settle(
        self, config: Config, prior: PriorFacts, train: Table | None, val: Table
    ) -> tuple[list[Settled], Table | None, Table]:
        """Return mean and deviation, and the images with targets that have mean 0 and deviation 1 in training."""
        names = val.classes
        if not self.is_present[val.targets].any():
            raise DataError(
                f"DATA.DATA_PATH: no validation image has a number in {', '.join(names)}, so nothing can be scored; "
                f"give the validation images of {config.DATA.DATA_PATH} their numbers"
            )
        if config.MODEL.NUM_CLASSES not in (None, len(names)):
            raise DataError(
                f"MODEL.NUM_CLASSES is {config.MODEL.NUM_CLASSES}, but the data have {counted(len(names), 'number')} "
                f"({', '.join(names)}); leave it out"
            )
        train, val = _with_columns(train), _with_columns(val)
        (mean, deviation), origin = _choose_scale(config, prior, train, names)
        if len(mean) != len(names):
            raise DataError(
                f"{MEAN} has {counted(len(mean), 'number')}, but the data have {len(names)} "
                f"({', '.join(names)}); leave it and {DEVIATION} out"
            )
        scale = np.array(mean), np.array(deviation)
        settings = [Settled(MEAN, tuple(mean), origin), Settled(DEVIATION, tuple(deviation), origin)] if origin else []
        return settings, _with_scale(train, scale), _with_scale(val, scale)


class RowTexts(Sequence):
    """The numbers of each row of a table [rows, names] as text, made when it is read."""

    def __init__(self, names: Sequence[str], values: np.ndarray):
        self._names, self._values = names, values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> str:
        pairs = zip(self._names, self._values[row].tolist(), strict=True)
        return ", ".join(f"{name} {value!r}" for name, value in pairs if not math.isnan(value))


@dataclass(frozen=True, eq=False)
class Strata(LabelSets):
    """The ranges of numbers in which an image lies, as the classes of a split."""

    numbers: np.ndarray  # the number of the set of each target

    part_noun, part_nouns = NumberTargets.part_noun, NumberTargets.part_nouns

    @classmethod
    def of(cls, strata: np.ndarray) -> "Strata":
        """`strata`: int [targets, outputs], the number of a range, or -1 where a number is missing."""
        numbers = np.zeros(len(strata), np.int64)
        for column in strata.T:  # sorting, as np.unique does, would take much longer
            # The strata of a column are NUM_STRATA consecutive numbers at most.
            keys = numbers * (NUM_STRATA + 1) + np.maximum(column - column.max(initial=0) + NUM_STRATA, 0)
            numbers = (np.cumsum(np.bincount(keys) > 0) - 1)[keys]
        examples = np.zeros(numbers.max(initial=-1) + 1, np.int64)  # a target with each set
        examples[numbers] = np.arange(len(numbers))
        return cls([tuple(number for number in row if number >= 0) for row in strata[examples].tolist()], numbers)

    def count(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        return super().count(self.numbers[targets], num_classes)

    def with_any(self, targets: np.ndarray, classes: np.ndarray) -> np.ndarray:
        return super().with_any(self.numbers[targets], classes)

    def classes_of(self, target: int) -> tuple[int, ...]:
        return super().classes_of(self.numbers[target])


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


# --- reading ---


def _from_texts(raw: RawLabels, name: str, column: list[str]) -> np.ndarray:
    """Return a column of texts as float64. Raise DataError for a text that is not a number."""
    try:  # all at once, because that is much faster
        values = np.array([float(cell or "nan") for cell in column])
        num_present = np.count_nonzero(np.abs(values) <= LARGEST)
        if num_present == len(column) - column.count("") and "_" not in "".join(column):
            return values
    except ValueError:
        pass
    numbers = [_parsed(cell) for cell in column]
    if None in numbers:
        row = numbers.index(None)
        remedy = "leave the cell empty if the number is missing, or correct it"
        if _parsed(column[row].replace(",", ".", 1)) is not None:
            remedy = f"write a decimal point, not a comma (columns are separated by {raw.separator!r})"
        raise DataError(
            f"{raw.where(row)}: {name} is {shortened(column[row])!r}, which is not a number of at most {LARGEST:g}; "
            f"{remedy}"
        )
    return np.array(numbers)


def _from_arrow(raw: RawLabels, name: str, column: Any) -> np.ndarray:
    """Return a column of a parquet file as float64. Raise DataError for another type, or a number that is too large."""
    import pyarrow

    try:
        values = column.cast(pyarrow.float64(), safe=False).to_numpy()
    except pyarrow.ArrowException:
        raise DataError(
            f"{raw.file}: {name} has the type {column.type}, not numbers; name other columns in DATA.COLUMNS"
        ) from None
    if (is_wrong := np.abs(values) > LARGEST).any():
        raise DataError(f"{raw.where(int(is_wrong.argmax()))}: {name} is {values[is_wrong][0]:g}; correct it")
    return values


def _numbers_in(tar: Tar, member: Member, ending: str, names: Sequence[str]) -> list[float]:
    """Return the numbers in a .json or .cls file of a tar."""
    where, content = f"{tar.title}: {member.name}", tar.read(member.offset, member.size)
    try:
        content_read = json.loads(content) if ending == "json" else content.decode().strip()
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; correct or remove the sample") from None
    if isinstance(content_read, dict) and not any(name in content_read for name in names):
        raise DataError(
            f"{where} has the keys {', '.join(content_read)}, not {', '.join(names)}; name them in DATA.COLUMNS"
        )
    values = [content_read.get(name) for name in names] if isinstance(content_read, dict) else [content_read]
    numbers = [_parsed("" if value is None else str(value)) for value in values]
    if len(numbers) != len(names) or None in numbers:
        raise DataError(f"{where} has {values} for {', '.join(names)}; it must have one number for each (DATA.COLUMNS)")
    return numbers


def _parsed(cell: str) -> float | None:
    """Return the number in a cell, NaN if it is missing, or None if the cell is not a number of at most LARGEST."""
    if cell.lower() in MISSING:
        return math.nan
    try:
        value = float(cell) if "_" not in cell else math.inf
    except ValueError:
        return None
    return value if abs(value) <= LARGEST else None


def _refuse_names(names: Sequence[str]) -> None:
    """Raise DataError for names that tables of results would mistake for their other columns."""
    taken = {"image", "image_path", *(f"{name}{end}" for name in names for end in ("_predicted", "_low", "_high"))}
    if wrong := [name for name in names if name in taken]:
        raise DataError(
            f"DATA.COLUMNS: {wrong[0]} is also a column of the results; give this column of the data another name"
        )


def _numeric_columns(schema: Any) -> list[str]:
    import pyarrow.types as types

    kinds = types.is_integer, types.is_floating, types.is_decimal
    return [column.name for column in schema if any(is_kind(column.type) for is_kind in kinds)]


# --- standardization ---


def _choose_scale(
    config: Config, prior: PriorFacts, train: Table | None, names: Sequence[str]
) -> tuple[tuple[Sequence[float], Sequence[float]], str]:
    """Return the mean and the deviation of each number, and where they come from if settings follow from them.

    A resumed run keeps them, also if images were added. The numbers that the weights predict keep those of the weights.
    Those of other numbers are measured; without training images they are 0 and 1.
    """
    if config.DATA.TARGET_MEAN:
        return (config.DATA.TARGET_MEAN, config.DATA.TARGET_STD), ""
    if prior.began.get(MEAN):
        return (prior.began[MEAN], prior.began[DEVIATION]), "the checkpoint"
    scales = _scale_of_weights(prior)
    origin = "the weights" if scales else ""
    if train is not None:
        scales = dict(zip(names, zip(*mean_and_deviation(config, train), strict=True), strict=True)) | scales
        origin = "the training images"
    means, deviations = zip(*(scales.get(name, (0.0, 1.0)) for name in names), strict=True)
    return (means, deviations), origin


def _with_columns(images: Table | None) -> Table | None:
    """Return images with a column for each class. Those that the data lack have no numbers."""
    if images is None:
        return None
    lacking = len(images.classes) - images.meaning.values.shape[1]
    if not lacking:
        return images
    values = np.pad(images.meaning.values, ((0, 0), (0, lacking)), constant_values=np.nan)
    return replace(images, meaning=replace(images.meaning, values=values))


def _scale_of_weights(prior: PriorFacts) -> dict[str, tuple[float, float]]:
    """Return {name: (mean, deviation)} of the numbers that weights of a run predict."""
    if not prior.trained.get(MEAN):  # they do not predict numbers
        return {}
    pairs = zip(prior.trained[MEAN], prior.trained[DEVIATION], strict=True)
    return dict(zip(prior.outputs, pairs, strict=False))


def _with_scale(image_set: Table | None, scale: tuple[np.ndarray, np.ndarray]) -> Table | None:
    if image_set is None:
        return None
    return replace(image_set, meaning=replace(image_set.meaning, scale=scale))


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
