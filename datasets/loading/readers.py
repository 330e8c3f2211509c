"""Reads images into batches. Each piece (a micro-batch of one process) becomes a batch, filled image by image.

A loader worker decodes an image (ImageSet.read), augments it, and writes it into its place in a uint8 batch. TrainData
groups the batches of an update into a window. With a GPU, a stream copies the batches ahead of time (ahead.py).
Trainer.update normalises them on the device.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Shape
from datasets.image_set import ImageReadError, ImageSet
from datasets.order import Order, Piece, Share, sample_rng
from datasets.transforms.crop import BySize, EvalTransform, TrainTransform
from datasets.types import Batch, Load
from utils.distributed import Process
from utils.errors import DataError, ensure
from utils.log import shown


class Buffers(NamedTuple):
    """The memory that the images of a batch are read into."""

    images: Tensor  # images and targets as in Batch
    targets: Tensor
    boxes: list[list[tuple[int, ...]]]  # the boxes to erase in each image


class Reader:
    """Reads images into batches. Several threads may call `fill` at once for different positions of one piece."""

    def __init__(self, image_set: ImageSet, config: Config):
        self.image_set, self.data, self.seed = image_set, config.DATA, config.SEED
        ensure(image_set.pixels.num_channels == self.data.IMAGE_CHANNELS, "images opened with other settings")
        self.num_classes = config.MODEL.NUM_CLASSES or len(image_set.classes)

    def allocate(self, piece: Piece, pinned: bool = False) -> Buffers:
        """Allocate the memory of a batch. Pinning it takes milliseconds at first; later, torch reuses pinned memory."""
        count, shape, dtype = len(piece.indices), self.shape(piece), self.image_set.pixels.dtype_in_batch
        targets = self.image_set.meaning.allocate(count, self.num_classes, pinned)
        # Decoded pixels have channels last in memory.
        images = torch.empty((count, *shape, self.data.IMAGE_CHANNELS), dtype=dtype, pin_memory=pinned)
        return Buffers(images.permute(0, 3, 1, 2), targets, [[]] * count)

    def shape(self, piece: Piece) -> Shape:
        """Return the height and width of the images in a batch."""
        return self.data.shape

    def put_target(self, index: int, image: np.ndarray, target: Tensor) -> None:
        """Write the target of an image to its place in a batch."""
        self.image_set.meaning.put(int(self.image_set.targets[index]), target)

    def fill(self, piece: Piece, positions: range, buffers: Buffers) -> list[int]:
        """Read the images at these positions of a piece into `buffers`. Return the indices of unreadable images."""
        raise NotImplementedError

    def batch(self, piece: Piece, buffers: Buffers, bad: list[int]) -> Batch:
        """Return the batch of a piece after `fill` has filled all its positions."""
        raise NotImplementedError

    def __getitem__(self, piece: Piece) -> Batch | DataError:
        """Return the batch of a piece. A DataError is returned, not raised, so that a worker sends it unchanged."""
        buffers = self.allocate(piece)
        try:
            bad = self.fill(piece, range(len(piece.indices)), buffers)
        except DataError as error:
            return error
        return self.batch(piece, buffers, bad)


class TrainReader(Reader):
    """Augments images with random numbers keyed by seed, epoch and image, and replaces unreadable images."""

    def __init__(self, image_set: ImageSet, config: Config):
        super().__init__(image_set, config)
        self.transforms = BySize(config, lambda sized: TrainTransform(sized, image_set.pixels))
        self.boxes = None
        if config.TRAIN.RANDOM_ERASE_PROB:
            from datasets.transforms.erase_and_mix import Boxes

            self.boxes = BySize(config, Boxes)

    def shape(self, piece: Piece) -> Shape:
        return self.transforms.at(piece.epoch).data.shape

    def fill(self, piece: Piece, positions: range, buffers: Buffers) -> list[int]:
        transform, boxes = self.transforms.at(piece.epoch), self.boxes and self.boxes.at(piece.epoch)
        bad: list[int] = []
        for position in positions:
            index, repeat = int(piece.indices[position]), int(piece.repeats[position])
            image, used = self._read_or_replace(piece.epoch, index, bad)
            if piece.epoch == 0 and (note := self.image_set.watch.note):
                note(used, image)
            transform(image, sample_rng(self.seed, piece.epoch, index, repeat=repeat), buffers.images[position])
            self.put_target(used, image, buffers.targets[position])
            if boxes:
                buffers.boxes[position] = boxes.row(piece, position)
        return bad

    def batch(self, piece: Piece, buffers: Buffers, bad: list[int]) -> Batch:
        boxes = np.array(buffers.boxes, np.int64) if self.boxes else None
        return Batch(buffers.images, buffers.targets, piece.num_samples, bad, piece, boxes)

    def _read_or_replace(self, epoch: int, index: int, bad: list[int]) -> tuple[np.ndarray, int]:
        """Return the image and its index, or a replacement and its index. Add unreadable images to `bad`."""
        try:
            return self.image_set.read(index), index
        except ImageReadError as error:
            from datasets.loading.replacements import read_replacement

            return read_replacement(self.image_set, self.seed, epoch, index, bad, error)


class EvalReader(Reader):
    """A reader that omits unreadable images and lists their indices in Batch.bad."""

    def __init__(self, image_set: ImageSet, config: Config):
        super().__init__(image_set, config)
        self.transform = EvalTransform(config.DATA, image_set.pixels)

    def fill(self, piece: Piece, positions: range, buffers: Buffers) -> list[int]:
        bad: list[int] = []
        for position in positions:
            index = int(piece.indices[position])
            try:
                image = self.image_set.read(index)
                if note := self.image_set.watch.note:
                    note(index, image)
                self.transform(image, buffers.images[position])
                self.put_target(index, image, buffers.targets[position])
            except ImageReadError:
                bad.append(index)
        return bad

    def batch(self, piece: Piece, buffers: Buffers, bad: list[int]) -> Batch:
        images, targets, _ = buffers
        if bad:
            readable = torch.from_numpy(~np.isin(piece.indices, bad))
            images, targets = images[readable], targets[readable]
        is_counted = piece.num_samples > 0
        return Batch(images, targets, len(images) if is_counted else 0, bad if is_counted else [], piece)


class Window(NamedTuple):
    """The images of one update."""

    step: int
    num_samples: int  # over all processes and micro-batches
    num_batches: int  # micro-batches of this process
    batches: Iterator[Batch]


class TrainData:
    """The training images of one process. `load` (make_loader in build.py) reads them, and prefetches them for a GPU.

    `order` computes the images of each update from seed and step only, and cuts them into a piece for each micro-batch
    of each process. So an update has the same images with 1 and with 8 processes if the global batch is the same.
    """

    def __init__(self, image_set: ImageSet, order: Order, process: Process, load: Load):
        self.image_set, self.order, self.rank = image_set, order, process.rank
        self._local_ranks = process.local_ranks
        self.num_samples = len(image_set)
        self.steps_per_epoch, self.global_batch = order.steps_per_epoch, order.global_batch
        self._load = load

    def windows(self, first_step: int, last_step: int, left_out: Collection[range] = ()) -> Iterator[Window]:
        """Yield the windows of steps first_step to last_step - 1. Images of steps left out are not read."""

        def steps() -> Iterator[int]:
            return (step for step in range(first_step, last_step) if not any(step in each for each in left_out))

        share = Share(self.order, self._local_ranks, last_step)

        def pieces() -> Iterator[Piece]:
            for step in steps():
                self.image_set.storage.will_read(self.image_set, share, step)
                yield from self.order.pieces(step, self.rank)

        if len(share.ranks) < self.order.world_size:
            self.image_set.storage.will_read(self.image_set, share, first_step)  # before loader processes are forked
        # Workers and the batches that they have prefetched persist across epochs.
        with contextlib.closing(self._load(pieces())) as batches:
            for step in steps():
                num_batches = self.order.num_micro_batches(step)
                of_step = itertools.islice(batches, num_batches)
                yield Window(step, self.order.window_size(step), num_batches, of_step)
                for _ in of_step:  # batches that the caller did not consume must not appear in the next window
                    pass


class EvalData:
    """The validation images of one process, in the order of the set. Each image belongs to exactly one process.

    A set that is read in groups (the row groups of parquet) is split into one contiguous part per process, so that each
    process reads only some groups. All processes get the same number of batches. A process that has no images left gets
    a batch that is excluded from the scores.
    """

    def __init__(self, image_set: ImageSet, batch_size: int, process: Process, load: Load, is_padded: bool = False):
        """Select the images of this process. `is_padded` means that the model is compiled for batches of one size."""
        self.image_set, self.batch_size, self.process, self.is_padded = image_set, batch_size, process, is_padded
        self.num_samples = len(image_set)  # over all processes
        # The images of each process, in order. Lower ranks may get one image more.
        numbers, size = np.arange(self.num_samples), process.world_size
        in_pieces = image_set.storage.is_read_in_groups
        shares = np.array_split(numbers, size) if in_pieces else [numbers[rank::size] for rank in range(size)]
        self.share, self._of_machine = shares[process.rank], np.concatenate([shares[n] for n in process.local_ranks])
        self._load = load

    def __iter__(self) -> Iterator[Batch]:
        share = self.share
        self.image_set.storage.will_evaluate(self.image_set, self._of_machine)
        largest = math.ceil(self.num_samples / self.process.world_size)  # the largest share of any process
        chunks = [share[start : start + self.batch_size] for start in range(0, largest, self.batch_size)]
        # A process that has no images left reads image 0, which num_samples 0 excludes from the scores.
        pieces = [Piece(0, chunk if len(chunk) else np.zeros(1, int), len(chunk)) for chunk in chunks]
        with contextlib.closing(self._load(pieces)) as batches:
            if self.process.rank:
                yield from batches
            else:
                yield from shown(batches, "evaluating", len(share), size=lambda batch: batch.num_samples)
