"""Several labels an image: the distinct sets of labels, of which each image has one."""

from array import array
from collections.abc import Iterable

import numpy as np


class LabelSets:
    """Sets of class numbers. Images share them, so that millions of images take a number each."""

    def __init__(self, starts: np.ndarray, numbers: np.ndarray):
        """Set i has the classes numbers[starts[i] : starts[i + 1]], each once."""
        self.starts, self.numbers = starts, numbers

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]]) -> "LabelSets":
        starts, numbers = array("q", [0]), array("i")
        for each in sets:
            numbers.extend(each)
            starts.append(len(numbers))
        return cls(np.frombuffer(starts, np.int64), np.frombuffer(numbers, np.int32))

    def __getitem__(self, number: int) -> np.ndarray:
        return self.numbers[self.starts[number] : self.starts[number + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def renumbered(self, lookup: np.ndarray) -> "LabelSets":
        """The same sets with other numbers of the classes."""
        return LabelSets(self.starts, lookup[self.numbers])

    def count_classes(self, counts: np.ndarray, num_classes: int) -> np.ndarray:
        """int64: how many images have each class, if so many (`counts`) have each set."""
        each = np.repeat(counts[: len(self)], np.diff(self.starts)[: len(counts)])
        return np.bincount(self.numbers[: len(each)], each, num_classes).astype(np.int64)

    def with_any(self, classes: np.ndarray) -> np.ndarray:
        """bool: whether each set has one of the classes."""
        found = np.concatenate([[0], np.cumsum(np.isin(self.numbers, classes))])
        return found[self.starts[1:]] > found[self.starts[:-1]]
