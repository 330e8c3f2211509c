"""Compute the images of each update and each process from seed, epoch and step, without any state.

The order of an epoch is cut into windows, one per update, and each window into pieces, one per micro-batch and process.
The windows depend on the global batch, but not on how it is cut into pieces. So a run can resume after any update, even
with another number of processes.
"""

import functools
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from datasets.shuffle import EpochOrder
from utils.seed import keyed_rng
from utils.text import counted

NUM_BLOCKS = 3  # blocks of the order in memory: the current, the previous and the next one
COMPUTED_AHEAD = 1 << 17  # minimum block size, in images, for computing ahead; smaller blocks take only milliseconds


class Piece(NamedTuple):
    """One micro-batch of one process."""

    epoch: int
    indices: np.ndarray  # indices of the images, at least one
    num_samples: int  # images that affect the result: all, or 0 for an image that keeps the processes synchronized
    # The following fields are used only in training.
    step: int = 0
    first: int = 0  # position of this piece's first image in the window
    repeats: np.ndarray | None = None  # for each image, a number that distinguishes its occurrences in this epoch

    def part(self, start: int, end: int) -> "Piece":
        """Return part of a training piece. All of its images affect the result."""
        return self._replace(
            indices=self.indices[start:end],
            num_samples=end - start,
            first=self.first + start,
            repeats=self.repeats[start:end],
        )


@dataclass(frozen=True)
class Order:
    """The order of training images. Steps and epochs are counted from 0 over the whole run."""

    num_images: int
    batch_size: int  # largest micro-batch of one process
    world_size: int
    num_accumulated: int
    drop_last: bool
    seed: int
    epoch_order: Callable[[int, int], EpochOrder]  # see ImageSet.epoch_order
    num_repeats: int = 1  # occurrences of each image in a window
    is_balanced: bool = False  # an image can occur several times in an epoch
    in_pairs: bool = False  # positions 2k and 2k + 1 of a window stay together; needs an even batch size
    resumed_global_batch: int | None = None  # global batch of a run that started with another number of processes

    @property
    def global_batch(self) -> int:
        """The number of images in a full window."""
        return self.resumed_global_batch or self.batch_size * self.world_size * self.num_accumulated

    @property
    def steps_per_epoch(self) -> int:
        num_full = self.num_images // self.global_batch
        # An epoch has at least one step, even if its images do not fill it.
        return max(num_full, 1) if self.drop_last else math.ceil(self.num_images / self.global_batch)

    def has_updates_of(self, saved: dict) -> bool:
        """Return whether an epoch has the same updates as with the settings saved in a checkpoint."""
        now = {"NUM_IMAGES": self.num_images, "GLOBAL_BATCH": self.global_batch, "DATA.DROP_LAST": self.drop_last}
        return all(saved.get(key, value) == value for key, value in now.items())

    def window_size(self, step: int) -> int:
        """Return the number of images in this step: a full window, or the remainder at the end of an epoch."""
        start = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.num_images - start)

    def num_micro_batches(self, step: int) -> int:
        """Return the number of pieces per process in this step."""
        return math.ceil(self.window_size(step) / (self.batch_size * self.world_size))

    def describe_split(self) -> str:
        """Describe how a full update is split over processes and micro-batches."""
        num_micro_batches = math.ceil(self.global_batch / (self.batch_size * self.world_size))
        each, rest = divmod(self.global_batch, self.world_size * num_micro_batches)
        size = f"{each} or {each + 1}" if rest else f"{each}"
        return f"{size} x {counted(self.world_size, 'process')} x {counted(num_micro_batches, 'micro-batch')}"

    def describe_epoch(self) -> str:
        """Describe the number and size of an epoch's updates, and the images that are left over."""
        num_full, rest = divmod(self.num_images, self.global_batch)
        if not num_full:
            return f"1 update of {counted(rest, 'image')}"
        is_split = self.global_batch > self.batch_size or self.world_size > 1
        updates = f"{counted(num_full, 'update')} of {counted(self.global_batch, 'image')}" + (
            f" ({self.describe_split()})" if is_split else ""
        )
        if not rest or self.num_repeats > 1:  # if images are repeated, an epoch never contains all of them
            return updates
        rest = counted(rest, "image")
        return f"{updates}; {rest} left out (DATA.DROP_LAST)" if self.drop_last else f"{updates} and one of {rest}"

    @property
    def unit(self) -> int:
        """The number of neighbouring images that stay in one piece."""
        return 2 if self.in_pairs else 1

    def largest_piece(self, step: int) -> int:
        """Return the size of the largest piece in this step. A last image without a partner is counted as a pair."""
        num_units = math.ceil(self.window_size(step) / self.unit)
        return math.ceil(num_units / (self.num_micro_batches(step) * self.world_size)) * self.unit

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of this step, and the position of its first image in the order of that epoch."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch, index * math.ceil(self.global_batch / self.num_repeats)

    def window(self, step: int) -> np.ndarray:
        """Return the indices of the images of this step, for all processes together."""
        epoch, start = self.place(step)
        images = self._epochs.part(epoch, slice(start, start + self._num_distinct(step)))
        # Each round is rotated by one more position, so that an image has a different neighbour in each round.
        rounds = [np.roll(images, -number) for number in range(self.num_repeats)]
        return np.concatenate(rounds)[: self.window_size(step)]

    @functools.cached_property
    def _epochs(self) -> "EpochOrders":
        return EpochOrders(functools.partial(self.epoch_order, self.seed))

    def _num_distinct(self, step: int) -> int:
        return math.ceil(self.window_size(step) / self.num_repeats)

    def pieces(self, step: int, rank: int) -> list[Piece]:
        """Return this process's micro-batches, whose sizes differ by at most one image or pair.

        A piece without images gets one image, with `num_samples` 0.
        """
        window, num_pieces = self.window(step), self.num_micro_batches(step) * self.world_size
        epoch, first = self.place(step)
        repeats, places = np.divmod(np.arange(len(window)), self._num_distinct(step))
        if self.is_balanced:
            repeats = repeats * self.num_images + first + places
        num_units = math.ceil(len(window) / self.unit)
        pieces = []
        for number in range(rank, num_pieces, self.world_size):
            edges = (num_units * edge // num_pieces * self.unit for edge in (number, number + 1))
            start, end = (min(edge, len(window)) for edge in edges)
            part = slice(start, end) if end > start else slice(1)
            pieces.append(Piece(epoch, window[part], end - start, step, start, repeats[part]))
        return pieces


class EpochOrders:
    """The orders of all epochs. Only a few of their blocks are in memory. Large blocks are computed in advance."""

    def __init__(self, epoch_order: Callable[[int], EpochOrder]):
        self._order = functools.lru_cache(2)(epoch_order)
        self._blocks: dict[tuple[int, int], Callable[[], np.ndarray]] = {}  # by epoch and block number
        self._pool = ThreadPoolExecutor(1, "epoch order")  # starts its thread with the first large block

    def part(self, epoch: int, positions: slice) -> np.ndarray:
        """Return the images at these positions of the epoch."""
        order = self._order(epoch)
        images = order.part(positions, lambda number: self._block(epoch, number))
        number = int(np.searchsorted(order.edges, positions.stop)) - 1  # the block of the last image
        start, stop = order.edges[number : number + 2]
        if stop - start >= COMPUTED_AHEAD and positions.stop > (start + stop) // 2:
            following = (epoch, number + 1) if stop < len(order) else (epoch + 1, 0)
            if following not in self._blocks:
                self._keep(following, self._pool.submit(self._compute, *following).result)
        return images

    def _block(self, epoch: int, number: int) -> np.ndarray:
        if (epoch, number) not in self._blocks:
            block = self._compute(epoch, number)
            self._keep((epoch, number), lambda: block)
        return self._blocks[epoch, number]()

    def _compute(self, epoch: int, number: int) -> np.ndarray:
        return self._order(epoch).block(number)

    def _keep(self, key: tuple[int, int], block: Callable[[], np.ndarray]) -> None:
        self._blocks[key] = block
        while len(self._blocks) > NUM_BLOCKS:
            del self._blocks[next(iter(self._blocks))]  # the oldest block


def sample_rng(seed: int, epoch: int, index: int, purpose: str = "augmentation", repeat: int = 0) -> random.Random:
    """Return the random generator for one image in one epoch. It is the same in every process."""
    return keyed_rng(purpose, seed, epoch, index, *([repeat] if repeat else []))
