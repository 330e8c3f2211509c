"""LabelSets: the targets of images that can have any number of labels."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.image_set import Table
from datasets.targets.class_labels import OneLabel
from datasets.targets.labels import Labels, RawLabels, Targets, shortened
from datasets.targets.one_class import count_classes
from utils.errors import DataError
from utils.text import first_of, warning

BITS = {"0": "0", "0.0": "0", "false": "0", "1": "1", "1.0": "1", "true": "1"}
LABELS_EXPECTED = (
    "DATA.LABEL_SEPARATOR must separate the names in the class column, or DATA.COLUMNS must name columns of 0 and 1"
)


@dataclass(frozen=True, eq=False)
class LabelSets(OneLabel):
    """An image can have any number of labels: its target is the number of a set of classes.

    Its label is a text: the names of the classes, separated by DATA.LABEL_SEPARATOR, or the values of columns of 0 and
    1, such as 0101. Batches: 0 or 1 [B, classes].
    """

    sets: Sequence[tuple[int, ...]]  # the distinct sets of class numbers
    labels_are: Literal["names"] = field(default="names", kw_only=True)

    has_one_name = False

    @classmethod
    def invent(cls, num_classes: int) -> "LabelSets":
        return cls([(number,) for number in range(num_classes)])

    @classmethod
    def parse(cls, config: Config, raw: RawLabels) -> list[str]:
        return _bits_of(raw) if config.DATA.has_label_columns else raw.columns[0]

    @classmethod
    def of_labels(cls, config: Config, parts: Sequence[Labels]) -> list[Targets]:
        parsed = [[_classes_in(config, part, text) for text in part.texts] for part in parts]
        names = parts[0].names if config.DATA.has_label_columns else sorted({*_flat(_flat(parsed))})
        if not any(_flat(parsed)):
            raise DataError(f"{parts[0].file}: no image has a label; {LABELS_EXPECTED}")
        number = {name: number for number, name in enumerate(names)}
        sets = [[tuple(number[name] for name in classes) for classes in of_part] for of_part in parsed]
        return [Targets(part.values, list(names), cls(own)) for part, own in zip(parts, sets, strict=True)]

    def describe(self, config: Config, images: Table) -> list[str]:
        """Describe the number of labels per image, and warn if DATA.LABEL_SEPARATOR seems to be wrong."""
        separator = config.DATA.LABEL_SEPARATOR
        sizes = np.array([len(numbers) for numbers in self.sets])[images.targets]
        empty = images.count_classes() == 0
        lines = [f"labels per image: {sizes.mean():.2f} on average, {sizes.min()} to {sizes.max()}"]
        if separator and sizes.max() == 1:
            lines.append(warning(f"no image has two labels separated by {separator!r}; check DATA.LABEL_SEPARATOR"))
        if empty.any():
            names = first_of([images.classes[number] for number in np.flatnonzero(empty)])
            lines.append(warning(f"no image has these classes: {names}"))
        return ["; ".join(lines)]

    def names(self, classes: Sequence[str]) -> Sequence[str]:
        return ["|".join(sorted(classes[number] for number in numbers)) for numbers in self.sets]

    def count(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        total = [0] * num_classes
        for numbers, count in zip(self.sets, count_classes(targets).tolist(), strict=False):
            for number in numbers:
                total[number] += count
        return np.array(total, np.int64)

    def with_any(self, targets: np.ndarray, classes: np.ndarray) -> np.ndarray:
        chosen = set(classes.tolist())
        return np.array([not chosen.isdisjoint(numbers) for numbers in self.sets])[targets]

    def classes_of(self, target: int) -> tuple[int, ...]:
        return self.sets[target]

    def renumber(self, targets: np.ndarray, lookup: np.ndarray) -> tuple["LabelSets", np.ndarray]:
        return LabelSets([tuple(lookup[list(numbers)].tolist()) for numbers in self.sets]), targets

    def allocate(self, count: int, num_classes: int, pinned: bool) -> Tensor:
        return torch.empty((count, num_classes), dtype=torch.float32, pin_memory=pinned)

    def put(self, target: int, place: Tensor) -> None:
        place.zero_()[list(self.sets[target])] = 1


_flat = itertools.chain.from_iterable


def _classes_in(config: Config, labels: Labels, text: str) -> Iterable[str]:
    """Return the class names in a label."""
    if config.DATA.has_label_columns:
        return [name for name, bit in zip(labels.names, text, strict=True) if bit == "1"]
    names = map(str.strip, normalize("NFC", text).split(config.DATA.LABEL_SEPARATOR))
    return dict.fromkeys(filter(None, names))


def _bits_of(raw: RawLabels) -> list[str]:
    """Return the columns of 0 and 1 as one text for each row."""
    bits = [[BITS.get(value.lower(), "") for value in values] for values in raw.columns]
    wrong = [(column.index(""), place) for place, column in enumerate(bits) if "" in column]
    for row, place in sorted(wrong)[:1]:
        value, name = raw.columns[place][row], raw.names[place]
        if not value:
            raise DataError(f"{raw.where(row)}: {name} is missing; fill it in or remove the row")
        raise DataError(
            f"{raw.where(row)}: {name} is {shortened(value)!r}; a column of labels (DATA.COLUMNS) has 1 for images "
            "with this label and 0 for the others (or true and false)"
        )
    return ["".join(row) for row in zip(*bits, strict=True)]
