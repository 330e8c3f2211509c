"""TRAIN.SIZE_SCHEDULE: the size of training images by epoch. An epoch is computed as by a run whose IMAGE_SIZE is its size."""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from configs.schema import Config

T = TypeVar("T")


class BySize(Generic[T]):
    """One object for each size of training images."""

    def __init__(self, config: Config, make: Callable[[Config], T]):
        """`make`: from the settings with the size as IMAGE_SIZE."""
        self._starts = config.train_sizes
        self._made = {side: make(with_side(config, side)) for side in self._starts.values()}

    def at(self, epoch: int) -> T:
        """The one for an epoch, from 0."""
        return self._made[self._starts[max(start for start in self._starts if start <= epoch)]]


def with_side(config: Config, side: int) -> Config:
    return replace(config, DATA=replace(config.DATA, IMAGE_SIZE=side))
