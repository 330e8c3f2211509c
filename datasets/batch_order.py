"""Which images an update sees, and which of them each process: arithmetic on (seed, epoch, step), nothing remembered.

An epoch's order is cut into windows, one for each update, and a window into pieces, one for each micro-batch of each
process. So what an update sees does not depend on how it is shared out, and a run may stop and go on anywhere, with
another number of processes too: order and steps depend on the global batch alone.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.seed import keyed_rng


class Piece(NamedTuple):
    """One micro-batch of one process."""

    epoch: int
    indices: np.ndarray  # of at least one image
    num_samples: int  # how many of them count: all, or 0 where the image only keeps a process in step
    # Of training only:
    step: int = 0
    first: int = 0  # position of the first image in the window
    repeats: np.ndarray | None = None  # how often the window has had each of the images before

    def part(self, start: int, end: int) -> "Piece":
        """The images at these places of a piece of training, all of which count."""
        return self._replace(
            indices=self.indices[start:end],
            num_samples=end - start,
            first=self.first + start,
            repeats=self.repeats[start:end],
        )


@dataclass(frozen=True)
class Order:
    """The order of training images. Steps are counted from 0 over the whole run, epochs too."""

    num_images: int
    batch_size: int  # of one process and micro-batch, at most
    world_size: int
    num_accumulated: int
    drop_last: bool
    seed: int
    epoch_order: Callable[[int, int], np.ndarray]  # of all images, from seed and epoch: see ImageSet
    num_repeats: int = 1  # how often a window holds each of its images
    in_pairs: bool = False  # positions 2k and 2k + 1 of a window stay together; asks for an even batch size
    kept: int | None = None  # images of a full window, where another number of processes began the run

    @property
    def global_batch(self) -> int:
        """Images of a full window."""
        return self.kept or self.batch_size * self.world_size * self.num_accumulated

    @property
    def steps_per_epoch(self) -> int:
        num_full = self.num_images // self.global_batch
        # An epoch has a step even when all its images do not fill one.
        return max(num_full, 1) if self.drop_last else math.ceil(self.num_images / self.global_batch)

    def window_size(self, step: int) -> int:
        """Images of this step: a full window, but for a remainder that is trained."""
        start = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.num_images - start)

    def num_micro_batches(self, step: int) -> int:
        """How many pieces each process gets of this step."""
        return math.ceil(self.window_size(step) / (self.batch_size * self.world_size))

    @property
    def unit(self) -> int:
        """Images that no cut may part."""
        return 2 if self.in_pairs else 1

    def largest_piece(self, step: int) -> int:
        """Images of the largest piece of this step, of whichever process; an odd window's last counts as a unit."""
        num_units = math.ceil(self.window_size(step) / self.unit)
        return math.ceil(num_units / (self.num_micro_batches(step) * self.world_size)) * self.unit

    def window(self, step: int) -> np.ndarray:
        """The images of this step, all processes' together."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * math.ceil(self.global_batch / self.num_repeats)
        images = _cached(self.epoch_order, self.seed, epoch)[start : start + self._num_distinct(step)]
        # Turned by one from one round to the next, so that an image has another neighbour each time.
        rounds = [np.roll(images, -number) for number in range(self.num_repeats)]
        return np.concatenate(rounds)[: self.window_size(step)]

    def _num_distinct(self, step: int) -> int:
        return math.ceil(self.window_size(step) / self.num_repeats)

    def pieces(self, step: int, rank: int) -> list[Piece]:
        """This process's micro-batches. Sizes differ by one at most, or by one pair; where a piece is empty, one image
        stands in."""
        window, num_pieces = self.window(step), self.num_micro_batches(step) * self.world_size
        repeats = np.arange(len(window)) // self._num_distinct(step)
        num_units = math.ceil(len(window) / self.unit)
        pieces = []
        for number in range(rank, num_pieces, self.world_size):
            edges = (num_units * edge // num_pieces * self.unit for edge in (number, number + 1))
            start, end = (min(edge, len(window)) for edge in edges)
            shown = slice(start, end) if end > start else slice(1)
            epoch = step // self.steps_per_epoch
            pieces.append(Piece(epoch, window[shown], end - start, step, start, repeats[shown]))
        return pieces


@functools.lru_cache(maxsize=1)
def _cached(epoch_order: Callable[[int, int], np.ndarray], seed: int, epoch: int) -> np.ndarray:
    return epoch_order(seed, epoch)


def sample_rng(seed: int, epoch: int, index: int, purpose: str = "augmentation", repeat: int = 0) -> random.Random:
    """The generator behind everything random about one image in one epoch, whichever process reads it."""
    return keyed_rng(purpose, seed, epoch, index, *([repeat] if repeat else []))
