"""The types that the packages of datasets/ share: what is known before images are opened, and a batch of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from datasets.order import Piece


class SavedData(NamedTuple):
    """The data record of a checkpoint that is resumed or evaluated."""

    classes: list[str]  # in the order of their numbers
    split: dict  # ImageSet.split; empty if a weights file lacks it
    validation: dict = {}  # datasets.fingerprint.validation_facts of the validation images
    facts: dict = {}  # datasets.fingerprint.data_facts; empty in weights files that halfstep export writes
    file: Path | None = None  # the checkpoint; next to it, split.csv lists the part of each image


SettingValue = bool | int | float | str | Sequence | Mapping | None


class Settled(NamedTuple):
    """A setting that the images, an earlier run or the weights decide."""

    name: str  # such as DATA.RANGE
    value: SettingValue
    origin: str  # where the value comes from, in words


class PriorFacts(NamedTuple):
    """Facts that are known before the images are read: from the command line, the checkpoint and the weights."""

    saved: SavedData | None = None  # of the run that is resumed or evaluated
    began: Mapping[str, SettingValue] = {}  # the settings with which a resumed run began
    trained: Mapping[str, SettingValue] = {}  # the settings with which the weights were trained
    outputs: Sequence[str] = ()  # the names of the weights' outputs
    implied: Mapping[str, SettingValue] = {}  # the settings that follow from the weights on the command line
    origins: Mapping[str, str] = {}  # where each setting comes from
    typed: Set[str] = frozenset()  # settings on the command line


NO_PRIOR_FACTS = PriorFacts()


@dataclass(frozen=True)
class CacheProgress:
    """Callbacks for progress and cancellation, and whether to build a missing cache."""

    say: Callable[[str], None]
    warn: Callable[[str], None]
    signal: Callable[[], int] = lambda: 0  # returns the number of the signal that has arrived, or 0
    may_build: bool = True
    is_check: bool = False  # describe a missing cache instead of building it
    within: Callable[[], AbstractContextManager] = nullcontext  # around the work, for a row of -check


class Batch(NamedTuple):
    """One micro-batch of one process."""

    images: Tensor  # [B, C, H, W] of Pixels.dtype_in_batch, usually uint8, channels last in memory
    # int64 [B]; several labels: float32 [B, classes], 0 or 1; numbers: float32 [B, outputs]
    targets: Tensor
    num_samples: int  # B, or 0 for an image that does not count: it keeps the processes in step
    bad: list[int]  # unreadable images: replaced in training, omitted in evaluation
    piece: Piece | None = None  # None in batches that were made by hand; erasing and mixing depend on it
    # int64 [B, RANDOM_ERASE_COUNT, 6] on the host: the boxes to erase. None: not drawn yet.
    boxes: np.ndarray | None = None

    @property
    def indices(self) -> np.ndarray:
        """Return the indices of the images of an evaluation."""
        return self.piece.indices[~np.isin(self.piece.indices, self.bad)][: self.num_samples]

    def parts(self, size: int) -> list["Batch"]:
        """Return this training batch in parts of at most `size` images."""
        count = len(self.targets)
        if count <= size:
            return [self]
        parts = []
        for start in range(0, count, size):
            end, bad = min(start + size, count), self.bad if start == 0 else []
            images, targets = self.images[start:end], self.targets[start:end]
            boxes = None if self.boxes is None else self.boxes[start:end]
            parts.append(Batch(images, targets, end - start, bad, self.piece.part(start, end), boxes))
        return parts


Load = Callable[[Iterable[Piece]], Iterator[Batch]]  # reads the batches of pieces


class Mixed(NamedTuple):
    """The targets of images that are each mixed from two images."""

    first: Tensor  # the targets of the images themselves, as in Batch
    second: Tensor  # the targets of their partners
    share: Tensor  # float32 [B], the weight of `first` in [0, 1]
