"""The targets of images that can have any number of labels."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from datasets.targets import OneClass, count_classes


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
