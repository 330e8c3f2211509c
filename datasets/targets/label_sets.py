"""The targets of images that can have any number of labels."""

import itertools
from collections.abc import Collection, Sequence
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.image_set import Table
from datasets.targets.by_label import ByName
from datasets.targets.labels import Cells, Labels, OneLabel, shortened
from datasets.targets.one_class import OneClass, count_classes
from utils.errors import DataError
from utils.text import first_of, warning

BITS = {"0": "0", "0.0": "0", "false": "0", "1": "1", "1.0": "1", "true": "1"}
LABELS_EXPECTED = (
    "DATA.LABEL_SEPARATOR must separate the names in the class column, or DATA.COLUMNS must name columns of 0 and 1"
)


class LabelSets(OneClass):
    """An image can have any number of labels: its target is the number of a set of classes.

    Batches: 0 or 1 [B, classes].
    """

    has_one_name = False

    def __init__(self, sets: list[tuple[int, ...]]):
        super().__init__(ByName())
        self.sets = sets  # the distinct sets of class numbers

    @classmethod
    def invent(cls, num_classes: int) -> "LabelSets":
        return cls([(number,) for number in range(num_classes)])

    def with_named_classes(self) -> "LabelSets":
        return self

    def names(self, classes: Sequence[str]) -> Sequence[str]:
        return ["|".join(sorted(classes[number] for number in each)) for each in self.sets]

    def count(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        total = [0] * num_classes
        for numbers, count in zip(self.sets, count_classes(targets).tolist(), strict=False):
            for number in numbers:
                total[number] += count
        return np.array(total, np.int64)

    def with_any(self, targets: np.ndarray, classes: np.ndarray) -> np.ndarray:
        numbers = set(classes.tolist())
        return np.array([not numbers.isdisjoint(each) for each in self.sets])[targets]

    def classes_of(self, target: int) -> tuple[int, ...]:
        return self.sets[target]

    def renumber(self, targets: np.ndarray, lookup: np.ndarray) -> tuple["LabelSets", np.ndarray]:
        return LabelSets([tuple(lookup[list(each)].tolist()) for each in self.sets]), targets

    def allocate(self, count: int, num_classes: int, pinned: bool) -> Tensor:
        return torch.empty((count, num_classes), dtype=torch.float32, pin_memory=pinned)

    def put(self, target: int, place: Tensor) -> None:
        place.zero_()[list(self.sets[target])] = 1

    def batch(self, targets: np.ndarray, num_classes: int) -> Tensor:
        places = self.allocate(len(targets), num_classes, pinned=False)
        for target, place in zip(targets.tolist(), places, strict=True):
            self.put(target, place)
        return places


class SeparatedLabels(OneLabel):
    """Labels that are each the names of any number of classes, separated by DATA.LABEL_SEPARATOR."""

    if_empty = None

    def numbers(self, lists: Sequence[Labels]) -> tuple[list[np.ndarray], list[str]]:
        """Return the number of each label as written, and the classes."""
        return [np.arange(len(each.written), dtype=np.int32) for each in lists], self._classes(lists)

    def _classes(self, lists: Sequence[Labels]) -> list[str]:
        return sorted({name for labels in lists for written in labels.written for name in self._parsed(written)})

    def meanings(self, lists: Sequence[Labels], classes: list[str], folders: list[str]) -> list[OneClass]:
        number = {name: number for number, name in enumerate(classes)}
        parsed = [[self._parsed(written) for written in labels.written] for labels in lists]
        if not any(itertools.chain.from_iterable(parsed)):
            raise DataError(f"{lists[0].file}: no image has a label; {LABELS_EXPECTED}")
        return [LabelSets([tuple(number[each] for each in found) for found in of_list]) for of_list in parsed]

    def _parsed(self, written: str) -> Collection[str]:
        """Return the class names in a label."""
        separator = self._config.DATA.LABEL_SEPARATOR
        return dict.fromkeys(filter(None, map(str.strip, normalize("NFC", written).split(separator))))

    def describe(self, train: Table) -> tuple[str, ...]:
        """Describe the number of labels per image, and warn if DATA.LABEL_SEPARATOR seems to be wrong."""
        separator = self._config.DATA.LABEL_SEPARATOR
        sizes = np.array([len(each) for each in train.meaning.sets])[train.targets]
        empty = train.count_classes() == 0
        lines = [f"labels per image: {sizes.mean():.2f} on average, {sizes.min()} to {sizes.max()}"]
        if separator and sizes.max() == 1:
            lines.append(warning(f"no image has two labels separated by {separator!r}; check DATA.LABEL_SEPARATOR"))
        if empty.any():
            names = first_of([train.classes[number] for number in np.flatnonzero(empty)])
            lines.append(warning(f"no image has these classes: {names}"))
        return ("; ".join(lines),)


class LabelColumns(SeparatedLabels):
    """Labels in a column of 0 and 1 for each class.

    A label is a string of the values in these columns, such as 0101.
    """

    of_csv = {"are_bits": True}
    if_empty = ""

    def __init__(self, config: Config, columns: Sequence[str]):
        super().__init__(config)
        self._columns = columns

    def from_cells(self, cells: Cells) -> list[str]:
        """Return the columns of 0 and 1 as one string for each row."""
        bits = [[BITS.get(value.lower(), "") for value in values] for values in cells.columns]
        wrong = [(found.index(""), place) for place, found in enumerate(bits) if "" in found]
        for row, place in sorted(wrong)[:1]:
            raise DataError(
                f"{cells.file}, line {cells.lines[row]}: {cells.names[place]} is "
                f"{shortened(cells.columns[place][row])!r}; a column of labels (DATA.COLUMNS) has 1 for images with "
                "this label and 0 for the others (or true and false)"
            )
        return ["".join(each) for each in zip(*bits, strict=True)]

    def _classes(self, lists: Sequence[Labels]) -> list[str]:
        return list(self._columns)

    def _parsed(self, written: str) -> Collection[str]:
        return [name for name, bit in zip(self._columns, written, strict=True) if bit == "1"]


def several_labels(config: Config, columns: Sequence[str]) -> SeparatedLabels:
    """Return how the labels of images that have any number of them are read."""
    return LabelColumns(config, columns) if config.DATA.has_label_columns else SeparatedLabels(config)
