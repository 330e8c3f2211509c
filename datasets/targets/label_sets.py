"""The targets of images that can have any number of labels."""

import itertools
from collections.abc import Collection, Sequence
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.targets.labels import Labels, OneLabel
from datasets.targets.one_class import OneClass, count_classes
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import first_of, warning

LABELS_EXPECTED = (
    "DATA.LABEL_SEPARATOR must separate the names in the class column, or DATA.COLUMNS must name columns of 0 and 1"
)


class LabelSets(OneClass):
    """An image can have any number of labels: its target is the number of a set of classes. Batches: 0 or 1 [B, classes]."""

    has_one_class = False

    def __init__(self, sets: list[tuple[int, ...]]):
        self.sets = sets  # the distinct sets of class numbers

    @classmethod
    def invent(cls, num_classes: int) -> "LabelSets":
        return cls([(number,) for number in range(num_classes)])

    def names(self, classes: Sequence[str]) -> Sequence[str]:
        return ["|".join(sorted(classes[number] for number in each)) for each in self.sets]

    def count(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        total = [0] * num_classes
        for numbers, count in zip(self.sets, count_classes(targets).tolist(), strict=False):
            for number in numbers:
                total[number] += count
        return np.array(total, np.int64)

    def with_any(self, targets: np.ndarray, classes: np.ndarray) -> np.ndarray:
        wanted = set(classes.tolist())
        return np.array([not wanted.isdisjoint(each) for each in self.sets])[targets]

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


class SeveralLabels(OneLabel):
    """Labels that name any number of classes, separated by DATA.LABEL_SEPARATOR, or in a column of 0 and 1 for each.

    With columns, a label is a string of the values in these columns, such as 0101.
    """

    def __init__(self, columns: Sequence[str] = ()):
        """`columns`: the label columns of DATA.COLUMNS, or none."""
        self._columns = columns

    def are_numbers(self, lists: list[Labels]) -> bool:
        return False

    def numbers(self, config: Config, lists: list[Labels]) -> tuple[list[np.ndarray], list[str]]:
        """Return the number of each label as written, and the classes."""
        names = {name for labels in self._parsed(config, lists) for found in labels for name in found}
        return [np.arange(len(each.written), dtype=np.int32) for each in lists], list(self._columns) or sorted(names)

    def meanings(self, config: Config, lists: list[Labels], classes: list[str]) -> list[OneClass]:
        number = {name: number for number, name in enumerate(classes)}
        parsed = self._parsed(config, lists)
        if not any(itertools.chain.from_iterable(parsed)):
            raise DataError(f"{lists[0].file}: no image has a label; {LABELS_EXPECTED}")
        return [LabelSets([tuple(number[each] for each in found) for found in of_list]) for of_list in parsed]

    def _parsed(self, config: Config, lists: list[Labels]) -> list[list[Collection[str]]]:
        """Return the class names in each label of each list."""
        separator = config.DATA.LABEL_SEPARATOR

        def parse(written: str) -> Collection[str]:
            if self._columns:
                return [name for name, bit in zip(self._columns, written, strict=True) if bit == "1"]
            return dict.fromkeys(filter(None, map(str.strip, normalize("NFC", written).split(separator))))

        return [[parse(written) for written in labels.written] for labels in lists]

    def describe(self, config: Config, train: ImageSet) -> tuple[str, ...]:
        """Describe the number of labels per image, and warn if DATA.LABEL_SEPARATOR seems to be wrong."""
        sizes = np.array([len(each) for each in train.meaning.sets])[train.targets]
        empty = train.count_classes() == 0
        lines = [f"labels per image: {sizes.mean():.2f} on average, {sizes.min()} to {sizes.max()}"]
        if config.DATA.LABEL_SEPARATOR and sizes.max() == 1:
            lines.append(
                warning(
                    f"no image has two labels separated by {config.DATA.LABEL_SEPARATOR!r}; check DATA.LABEL_SEPARATOR"
                )
            )
        if empty.any():
            names = first_of([train.classes[number] for number in np.flatnonzero(empty)])
            lines.append(warning(f"no image has these classes: {names}"))
        return ("; ".join(lines),)
