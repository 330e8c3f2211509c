"""Which images each update and each process sees, computed from seed, epoch and step without any state.

The order of an epoch is cut into windows, one per update, and a window into pieces, one per micro-batch and process.
What an update sees does not depend on that split, and a run can stop and resume anywhere, with another number of
processes too: order and steps depend on the global batch alone.
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

NUM_BLOCKS = 3  # kept of the order: the one in use, the one before, and the next
COMPUTED_AHEAD = 1 << 17  # blocks from this size on are: a smaller one takes a few milliseconds


class Piece(NamedTuple):
    """One micro-batch of one process."""

    epoch: int
    indices: np.ndarray  # of at least one image
    num_samples: int  # how many of them count: all, or 0 if the image only keeps this process in step with the others
    # In training only:
    step: int = 0
    first: int = 0  # position of the first image in the window
    repeats: np.ndarray | None = None  # tells the occurrences of an image in this epoch apart

    def part(self, start: int, end: int) -> "Piece":
        """The images at these positions of a training piece, all of which count."""
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
    is_balanced: bool = False  # an epoch can have an image several times
    in_pairs: bool = False  # positions 2k and 2k + 1 of a window stay together; needs an even batch size
    resumed_global_batch: int | None = None  # of a run that was started with another number of processes

    @property
    def global_batch(self) -> int:
        """Images of a full window."""
        return self.resumed_global_batch or self.batch_size * self.world_size * self.num_accumulated

    @property
    def steps_per_epoch(self) -> int:
        num_full = self.num_images // self.global_batch
        # An epoch has a step even when all its images do not fill one.
        return max(num_full, 1) if self.drop_last else math.ceil(self.num_images / self.global_batch)

    def has_updates_of(self, saved: dict) -> bool:
        """Whether epochs have the same updates as with these settings, which a checkpoint holds."""
        now = {"NUM_IMAGES": self.num_images, "GLOBAL_BATCH": self.global_batch, "DATA.DROP_LAST": self.drop_last}
        return all(saved.get(key, value) == value for key, value in now.items())

    def window_size(self, step: int) -> int:
        """Images of this step: a full window, or the remainder at the end of an epoch."""
        start = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.num_images - start)

    def num_micro_batches(self, step: int) -> int:
        """The number of pieces of each process in this step."""
        return math.ceil(self.window_size(step) / (self.batch_size * self.world_size))

    def describe_split(self) -> str:
        """Describe how a full update is split over processes and micro-batches."""
        num_micro_batches = math.ceil(self.global_batch / (self.batch_size * self.world_size))
        each, rest = divmod(self.global_batch, self.world_size * num_micro_batches)
        size = f"{each} or {each + 1}" if rest else f"{each}"
        return f"{size} x {counted(self.world_size, 'process')} x {counted(num_micro_batches, 'micro-batch')}"

    def describe_epoch(self) -> str:
        """Describe how many updates of how many images an epoch is, and what is left of its images."""
        num_full, rest = divmod(self.num_images, self.global_batch)
        if not num_full:
            return f"1 update of {counted(rest, 'image')}"
        is_split = self.global_batch > self.batch_size or self.world_size > 1
        updates = f"{counted(num_full, 'update')} of {counted(self.global_batch, 'image')}" + (
            f" ({self.describe_split()})" if is_split else ""
        )
        if not rest or self.num_repeats > 1:  # an epoch with repeats sees a part of the images anyway
            return updates
        rest = counted(rest, "image")
        return f"{updates}; {rest} left out (DATA.DROP_LAST)" if self.drop_last else f"{updates} and one of {rest}"

    @property
    def unit(self) -> int:
        """The number of neighbouring images that stay in one piece."""
        return 2 if self.in_pairs else 1

    def largest_piece(self, step: int) -> int:
        """Images of the largest piece of any process in this step; the last image of an odd window counts as a unit."""
        num_units = math.ceil(self.window_size(step) / self.unit)
        return math.ceil(num_units / (self.num_micro_batches(step) * self.world_size)) * self.unit

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of this step, and the position of its first image in the order of that epoch."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch, index * math.ceil(self.global_batch / self.num_repeats)

    def window(self, step: int) -> np.ndarray:
        """The images of this step, over all processes."""
        epoch, start = self.place(step)
        images = self._epochs.part(epoch, slice(start, start + self._num_distinct(step)))
        # Each round is rotated by one more, so that an image has another neighbour each time.
        rounds = [np.roll(images, -number) for number in range(self.num_repeats)]
        return np.concatenate(rounds)[: self.window_size(step)]

    @functools.cached_property
    def _epochs(self) -> "EpochOrders":
        return EpochOrders(functools.partial(self.epoch_order, self.seed))

    def _num_distinct(self, step: int) -> int:
        return math.ceil(self.window_size(step) / self.num_repeats)

    def pieces(self, step: int, rank: int) -> list[Piece]:
        """This process's micro-batches, whose sizes differ by at most one image or pair.

        An empty piece gets one image that does not count.
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
    """The orders of all epochs, of which a few blocks are in memory: large ones are computed before they are needed."""

    def __init__(self, epoch_order: Callable[[int], EpochOrder]):
        self._order = functools.lru_cache(2)(epoch_order)
        self._blocks: dict[tuple[int, int], Callable[[], np.ndarray]] = {}  # by epoch and number
        self._pool = ThreadPoolExecutor(1, "epoch order")  # without a thread before the first large block

    def part(self, epoch: int, positions: slice) -> np.ndarray:
        """The images at these positions of the epoch."""
        order = self._order(epoch)
        images = order.part(positions, lambda number: self._block(epoch, number))
        number = int(np.searchsorted(order.edges, positions.stop)) - 1  # of the block of the last of them
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
            del self._blocks[next(iter(self._blocks))]  # the oldest


def sample_rng(seed: int, epoch: int, index: int, purpose: str = "augmentation", repeat: int = 0) -> random.Random:
    """The generator for one image in one epoch, the same in whichever process reads it."""
    return keyed_rng(purpose, seed, epoch, index, *([repeat] if repeat else []))
