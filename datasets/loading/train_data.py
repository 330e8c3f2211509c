"""The training images of a process, update by update, and its evaluation images."""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from datasets.batch_order import Order, Piece
from datasets.types import Batch, ImageSet
from utils.bar import shown


class Window(NamedTuple):
    """The images of one update."""

    step: int
    num_samples: int  # over all processes and micro-batches
    num_batches: int  # micro-batches of this process
    batches: Iterator[Batch]


class TrainData:
    """Training images of one process, in the order that seed and step determine."""

    def __init__(
        self, image_set: ImageSet, order: Order, rank: int, load: Callable[[Iterable[Piece]], Iterator[Batch]]
    ):
        self.image_set, self.order, self.rank = image_set, order, rank
        self.num_samples = len(image_set)
        self.steps_per_epoch, self.global_batch = order.steps_per_epoch, order.global_batch
        self._load = load

    def windows(self, first_step: int, last_step: int, skipped: Collection[range] = ()) -> Iterator[Window]:
        """Steps first_step .. last_step - 1 of the run without the skipped ones, whose images are not read.

        Workers, and the batches that they have read ahead, live on across epochs.
        """

        def steps() -> Iterator[int]:
            return (step for step in range(first_step, last_step) if not any(step in each for each in skipped))

        def pieces() -> Iterator[Piece]:
            for step in steps():
                self.image_set.will_read(self.order.seed, *self.order.place(step))
                yield from self.order.pieces(step, self.rank)

        with contextlib.closing(self._load(pieces())) as batches:
            for step in steps():
                num_batches = self.order.num_micro_batches(step)
                of_step = itertools.islice(batches, num_batches)
                yield Window(step, self.order.window_size(step), num_batches, of_step)
                for _ in of_step:  # batches that the caller did not take must not turn up in the next window
                    pass


class EvalData:
    """The evaluation images of this process: each image is on one process, once, in the order of the set.

    All processes get the same number of batches. One that has no images left gets an image that does not count.
    """

    def __init__(
        self,
        image_set: ImageSet,
        batch_size: int,
        rank: int,
        world_size: int,
        load: Callable[[Iterable[Piece]], Iterator[Batch]],
        is_padded: bool = False,
    ):
        """`is_padded`: the model has to see batches of one size, because it is compiled for it."""
        self.image_set, self.batch_size, self.rank, self.world_size = image_set, batch_size, rank, world_size
        self.is_padded = is_padded
        self.num_samples = len(image_set)  # of all processes
        self.share = np.arange(rank, self.num_samples, world_size)  # the images of this process, in their order
        self._load = load

    def __iter__(self) -> Iterator[Batch]:
        share = self.share
        largest = math.ceil(self.num_samples / self.world_size)  # share of any process
        chunks = [share[start : start + self.batch_size] for start in range(0, largest, self.batch_size)]
        pieces = [Piece(0, chunk if len(chunk) else np.zeros(1, int), len(chunk)) for chunk in chunks]
        with contextlib.closing(self._load(pieces)) as batches:
            if self.rank:
                yield from batches
            else:
                yield from shown(batches, "evaluating", len(share), size=lambda batch: batch.num_samples)
