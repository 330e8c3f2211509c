"""OneClass: each image has one class. kinds.py says which other kinds of targets there are, and how to add one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.types import PriorFacts, Settled

Images = TypeVar("Images")  # a Table, whose class is above this file
NUM_SMALLEST = 3  # the number of smallest classes that the log names


@dataclass(frozen=True, eq=False)
class OneClass:
    """What the target numbers of an image set mean: here, the number of the class of each image."""

    # What the source knows of the classes: the list of their names by number, or only labels, names or numbers
    labels_are: Literal["listed", "names", "numbers"] = field(default="listed", kw_only=True)
    # If labels are numbers, and the images of each class have a folder of their own: the names of these folders
    folders: Sequence[str] = field(default=(), kw_only=True)

    part_noun: ClassVar[str] = "class"  # the parts of the data from which a split takes an equal share
    part_nouns: ClassVar[str] = "classes"
    near_copies_agree: ClassVar[bool] = True  # whether images that look the same must have the same target

    @property
    def has_one_name(self) -> bool:
        """Return whether the label of each image is the name of one class."""
        return self.labels_are != "numbers"

    @classmethod
    def invent(cls, num_classes: int) -> Self:
        """Return the meaning of random target numbers below the number of classes, for trials with invented images."""
        return cls(labels_are="numbers")

    def names(self, classes: Sequence[str]) -> Sequence[str]:
        """Return the meaning of each target number."""
        return classes

    def content(self, classes: Sequence[str], targets: np.ndarray) -> Iterator[bytes | np.ndarray]:
        """Yield values to hash, which depend on the labels but not on how their classes are numbered."""
        meanings = self.names(classes)
        places = {name: place for place, name in enumerate(sorted(set(meanings)))}
        lookup = np.array([places[name] for name in meanings], "<i4")
        is_sorted = np.array_equal(lookup, np.arange(len(lookup)))
        yield "\0".join(places).encode(errors="surrogateescape")
        for start in range(0, len(targets), 2**20):
            part = targets[start : start + 2**20]
            yield np.ascontiguousarray(part, "<i4") if is_sorted else lookup[part]

    def count(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return int64 [classes]: the number of images with each class."""
        return count_classes(targets, num_classes)

    def describe_counts(self, classes: Sequence[str], trained: np.ndarray, validation: np.ndarray) -> list[str]:
        """Describe the classes with the fewest images: they are learned worst, and their accuracy is least certain."""
        if len(classes) == 1:
            return []
        total = trained + validation
        smallest = sorted(np.flatnonzero(total).tolist(), key=lambda number: total[number])[:NUM_SMALLEST]
        names = (f"{classes[number]} ({trained[number]:,}/{validation[number]:,})" for number in smallest)
        return [f"smallest classes (train/val): {', '.join(names)}"]

    def with_any(self, targets: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether each image has one of these classes."""
        return np.isin(targets, classes)

    def classes_of(self, target: int) -> tuple[int, ...]:
        """Return the class numbers that a target number means."""
        return (target,)

    def class_folders(self, classes: Sequence[str]) -> Sequence[str]:
        """Return the names of the folders that are class folders wherever they occur in a path."""
        return () if self.labels_are == "numbers" else classes  # other folders may have numbers as names too

    def renumber(self, targets: np.ndarray, lookup: np.ndarray) -> tuple["OneClass", np.ndarray]:
        """Return the meaning and the targets after class i has become class lookup[i]."""
        return self, lookup[targets]

    def strata(self, table: Images) -> Images:
        """Return the images with the classes from which a split takes an equal share: by default their own."""
        return table

    def settle(
        self, config: Config, prior: PriorFacts, train: Images | None, val: Images
    ) -> tuple[list[Settled], Images | None, Images]:
        """Measure what the targets of a batch depend on. Return the settings that follow, and the images with it."""
        return [], train, val

    # --- batches ---

    def allocate(self, count: int, num_classes: int, pinned: bool) -> Tensor:
        """Return memory for the targets of a batch: int64 [B]."""
        return torch.empty(count, dtype=torch.int64, pin_memory=pinned)

    def put(self, target: int, place: Tensor) -> None:
        """Write the target of an image to its place in a batch."""
        place.fill_(target)

    def batch(self, targets: np.ndarray, num_classes: int) -> Tensor:
        """Return the targets of a batch that has these target numbers."""
        places = self.allocate(len(targets), num_classes, pinned=False)
        for target, place in zip(targets.tolist(), places, strict=True):
            self.put(target, place)
        return places


def count_classes(targets: np.ndarray, at_least: int = 0) -> np.ndarray:
    """Return the number of images of each class as int64, counted in pieces, because bincount makes an int64 copy."""
    counts = [np.bincount(targets[start : start + 2**20]) for start in range(0, len(targets), 2**20)]
    total = np.zeros(max([at_least, *map(len, counts)]), np.int64)
    for part in counts:
        total[: len(part)] += part
    return total
