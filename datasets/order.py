"""The order of an epoch, and the images of each update and each process, from seed, epoch and step without any state.

The order of an epoch is cut into windows, one per update, and each window into pieces, one per micro-batch and process.
The windows depend on the global batch, but not on how it is cut into pieces. So a run can resume after any update, even
with another number of processes.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.seed import keyed_rng
from utils.text import counted

FRACTION_BITS = 31  # bits of a sort key that hold a random number in [0, 1); the position takes the other 32
CLASS_BITS = 24  # the number of upper bits of a 64-bit sort key that hold the class; the lower bits are random
EpochOrder = Callable[[int, int], np.ndarray]  # (seed, epoch) -> the images of an epoch in their order


# --- orders of an epoch: they depend only on their seeds, not on the version of numpy ---


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """Return the numbers 0 .. count - 1 in an order that depends only on the seeds."""
    return np.argsort(_draws(count, *seeds), kind="stable").astype(np.uint32)


def nearby_shuffled(count: int, reach: int, *seeds: int) -> np.ndarray:
    """Return the numbers 0 .. count - 1, each moved by less than `reach` positions.

    A reach of `count` allows any order.

    Number i is sorted by i + reach x a random number in [0, 1). So it comes after all numbers up to i - reach, and
    before all numbers from i + reach on.
    """
    if reach >= count:
        return shuffled(count, *seeds)
    fractions = (_draws(count, *seeds) >> np.uint64(64 - FRACTION_BITS)).astype(np.int64)
    keys = (np.arange(count, dtype=np.int64) << FRACTION_BITS) + reach * fractions
    return np.argsort(keys, kind="stable").astype(np.uint32)


def grouped_shuffled(starts: np.ndarray, reach: int, seed: int, epoch: int) -> np.ndarray:
    """Shuffle groups, such as the tars of a set, and then move each image by less than `reach` positions.

    `starts` [groups + 1]: the first image of each group of neighbours, then the number of all images.
    """
    # The last seed, 1 here and 2 below, separates the two draws. It is not 0, because numpy ignores trailing zeros.
    groups = shuffled(len(starts) - 1, seed, epoch, 1)
    sizes = np.diff(starts)[groups]
    first = np.repeat(starts[groups] - (np.cumsum(sizes) - sizes), sizes)
    in_turn = first + np.arange(starts[-1])  # group after group
    return in_turn[nearby_shuffled(int(starts[-1]), reach, seed, epoch, 2)].astype(np.uint32)


def balanced_order(targets: np.ndarray, counts: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return an epoch with as many places as the set has images, divided equally among the classes.

    A class with fewer images than places repeats all of them equally often, and fills the other places with a random
    subset. A class with more images than places uses a random subset. `counts`: the number of images of each class.
    """
    # One random number from 0 to 1 moves the edges of all classes. So a class whose share is 2.4 places has 2 or 3 of
    # them, and 2.4 on average. The last seed, 3 here and 4 below, makes these draws independent of each other.
    start = (_draws(1, seed, epoch, 3)[0] >> np.uint64(11)) / 2.0**53
    edges = np.floor(len(targets) * np.arange(1, len(counts) + 1) / len(counts) + start)
    first_places = np.concatenate([[0], edges]).astype(np.int64)
    keys = _draws(len(targets), seed, epoch, 4) >> np.uint64(CLASS_BITS)
    keys |= targets.astype(np.uint64) << np.uint64(64 - CLASS_BITS)
    by_class = np.argsort(keys, kind="stable").astype(np.uint32)  # in random order within each class
    places = shuffled(len(targets), seed, epoch).astype(np.int64)
    classes = np.searchsorted(first_places, places, "right") - 1
    within = (places - first_places[classes]) % counts[classes]
    return by_class[(np.cumsum(counts) - counts)[classes] + within]


def _draws(count: int, *seeds: int) -> np.ndarray:
    """Return uint64 draws. numpy guarantees them in every version, but not the order of `Generator.permutation`."""
    return np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)


# --- the images of an update ---


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
    epoch_order: EpochOrder  # see ImageSet.epoch_order
    num_repeats: int = 1  # occurrences of each image in a window
    is_balanced: bool = False  # an image can occur several times in an epoch
    in_pairs: bool = False  # positions 2k and 2k + 1 of a window stay together; needs an even batch size
    fixed_global_batch: int | None = None  # the global batch, if it does not follow from the fields above

    @property
    def global_batch(self) -> int:
        """The number of images in a full window."""
        return self.fixed_global_batch or self.batch_size * self.world_size * self.num_accumulated

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
        size_of_one, rest = divmod(self.global_batch, self.world_size * num_micro_batches)
        size = f"{size_of_one} or {size_of_one + 1}" if rest else f"{size_of_one}"
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
        images = self._epoch(epoch)[start : start + self._num_distinct(step)].astype(np.int64)
        # Each round is rotated by one more position, so that an image has a different neighbour in each round.
        rounds = [np.roll(images, -number) for number in range(self.num_repeats)]
        return np.concatenate(rounds)[: self.window_size(step)]

    @functools.cached_property
    def _epoch(self) -> Callable[[int], np.ndarray]:
        """A function that returns the order of an epoch. It keeps two epochs, since batches are read ahead."""
        return functools.lru_cache(2)(functools.partial(self.epoch_order, self.seed))

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


class Share(NamedTuple):
    """The training images that the processes of one machine read before step `end`."""

    order: Order
    ranks: range
    end: int


def sample_rng(seed: int, epoch: int, index: int, purpose: str = "augmentation", repeat: int = 0) -> random.Random:
    """Return the random generator for one image in one epoch. It is the same in every process."""
    return keyed_rng(purpose, seed, epoch, index, *([repeat] if repeat else []))
