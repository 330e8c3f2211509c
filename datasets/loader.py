"""Batches for training and evaluation, read ahead by worker processes that keep no state of their own."""

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from configs.schema import Config, Data
from datasets.image_set import ImageReadError, ImageSet
from datasets.order import Order, Piece, sample_rng
from datasets.transforms import EvalTransform, TrainTransform
from utils.errors import DataError

MOST_WORKERS = 8
NUM_REPLACEMENTS = 8  # images tried in place of an unreadable one: so many of its class, then as many of any


class Batch(NamedTuple):
    """One micro-batch of one process."""

    images: Tensor  # uint8 [B, C, H, W], channels last in memory
    targets: Tensor  # int64 [B]
    num_samples: int  # B, or 0 for an image that only keeps this process in step with the others
    bad: list[int]  # images that could not be read: replaced in training, left out in evaluation


class Window(NamedTuple):
    """What one update sees."""

    step: int
    num_samples: int  # over all processes and micro-batches
    num_batches: int  # micro-batches of this process
    batches: Iterator[Batch]


class TrainData:
    """Training images of one process, in the order that follows from seed and step."""

    def __init__(
        self, image_set: ImageSet, order: Order, rank: int, load: Callable[[Iterable[Piece]], Iterator[Batch]]
    ):
        self.image_set, self.order, self.rank = image_set, order, rank
        self.num_samples = len(image_set)
        self.steps_per_epoch, self.global_batch = order.steps_per_epoch, order.global_batch
        self._load = load

    def windows(self, first_step: int, last_step: int) -> Iterator[Window]:
        """Steps first_step .. last_step - 1 of the run. Workers and what they read ahead live on across epochs."""
        steps = range(first_step, last_step)
        pieces = itertools.chain.from_iterable(self.order.pieces(step, self.rank) for step in steps)
        with contextlib.closing(self._load(pieces)) as batches:
            for step in steps:
                num_batches = self.order.num_micro_batches(step)
                of_step = itertools.islice(batches, num_batches)
                yield Window(step, self.order.window_size(step), num_batches, of_step)
                for _ in of_step:  # what nobody asked for must not turn up in the next window
                    pass


class EvalData:
    """This process's share of the evaluation images: every one once, on one process, in the set's order."""

    def __init__(
        self,
        image_set: ImageSet,
        batch_size: int,
        rank: int,
        world_size: int,
        load: Callable[[Iterable[Piece]], Iterator[Batch]],
    ):
        self.image_set, self.batch_size, self.rank, self.world_size = image_set, batch_size, rank, world_size
        self.num_samples = len(image_set)  # of all processes
        self._load = load

    def __iter__(self) -> Iterator[Batch]:
        share = np.arange(self.rank, self.num_samples, self.world_size)
        chunks = [share[start : start + self.batch_size] for start in range(0, len(share), self.batch_size)]
        pieces = [Piece(0, chunk, len(chunk)) for chunk in chunks]
        with contextlib.closing(self._load(pieces)) as batches:
            yield from batches


class TrainReader:
    """Reads pieces for training: augments, and puts another image in the place of an unreadable one."""

    def __init__(self, image_set: ImageSet, config: Config):
        self.image_set, self.data, self.seed = image_set, config.DATA, config.SEED
        self.transform = TrainTransform(config.DATA)

    def __getitem__(self, piece: Piece) -> Batch | DataError:
        images, targets = _room_for(piece, self.data)
        bad: list[int] = []
        try:
            for place, index in enumerate(piece.indices.tolist()):
                image, shown = self._read_or_replace(piece.epoch, index, bad)
                images[place] = self.transform(image, sample_rng(self.seed, piece.epoch, index))
                targets[place] = int(self.image_set.targets[shown])
        except DataError as error:
            return error
        return Batch(images, targets, piece.num_samples, bad)

    def _read_or_replace(self, epoch: int, index: int, bad: list[int]):
        """The image and its index, or those of the image in its place; what cannot be read is added to `bad`."""
        for candidate in self._candidates(epoch, index):
            try:
                return self.image_set.read(candidate), candidate
            except ImageReadError as error:
                reason = error
                bad.append(candidate)
        raise DataError(
            f"{self.image_set.name(index)} cannot be read, nor can {2 * NUM_REPLACEMENTS} others ({reason}); "
            "look whether DATA.DATA_PATH is still there"
        )

    def _candidates(self, epoch: int, index: int) -> Iterator[int]:
        yield index
        rng = sample_rng(self.seed, epoch, index, "replacement")
        targets = self.image_set.targets
        for pool in (np.flatnonzero(targets == targets[index]), range(len(targets))):
            for _ in range(NUM_REPLACEMENTS):
                yield int(pool[int(rng.random() * len(pool))])


class EvalReader:
    """Reads pieces for evaluation: leaves out what cannot be read, and says so."""

    def __init__(self, image_set: ImageSet, config: Config):
        self.image_set, self.data = image_set, config.DATA
        self.transform = EvalTransform(config.DATA)

    def __getitem__(self, piece: Piece) -> Batch | DataError:
        images, targets = _room_for(piece, self.data)
        bad: list[int] = []
        count = 0
        try:
            for index in piece.indices.tolist():
                try:
                    image = self.image_set.read(index)
                except ImageReadError:
                    bad.append(index)
                    continue
                images[count] = self.transform(image)
                targets[count] = int(self.image_set.targets[index])
                count += 1
        except DataError as error:
            return error
        return Batch(images[:count], targets[:count], count, bad)


def _room_for(piece: Piece, data: Data) -> tuple[Tensor, Tensor]:
    """Unfilled images, laid out as Pillow's pixels are so that each is copied in one go, and targets."""
    count, side = len(piece.indices), data.IMAGE_SIZE
    images = torch.empty((count, side, side, data.IMAGE_CHANNELS), dtype=torch.uint8)
    return images.permute(0, 3, 1, 2), torch.empty(count, dtype=torch.int64)


def load_batches(
    pieces: Iterable[Piece], reader: TrainReader | EvalReader, num_workers: int, device: torch.device
) -> Iterator[Batch]:
    """The batches of the pieces, in their order. To close this generator ends the workers."""
    # Forked where that is safe: started anew, each worker would first import torch, for seconds.
    context = "fork" if num_workers and sys.platform == "linux" else None
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=pieces,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        multiprocessing_context=context,
        generator=torch.Generator(),  # the loader draws a seed, and must not take it from the run's generator
    )
    with _signals_held_back():
        batches = iter(loader)  # here the workers start
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    finally:
        del batches  # which ends the workers


def _as_it_is(batch: Batch) -> Batch:
    return batch


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes started in here never see these signals, the parent sees them a little later.

    Ctrl-C and Slurm's warnings reach every process of a run. The parent saves, for which it needs its workers, and then
    ends them itself.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@atexit.register
def _kill_workers() -> None:
    """At exit multiprocessing sends SIGTERM, which workers do not see, and waits: so nothing may be left to wait for."""
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call their end an error
    for worker in workers:
        worker.kill()


def count_workers(data: Data, image_set: ImageSet, world_size: int, device: torch.device) -> int:
    """Worker processes of one training process: its share of the cores that this machine grants us."""
    if data.NUM_WORKERS is not None:
        return data.NUM_WORKERS
    if image_set.in_memory:
        return 0
    return min(MOST_WORKERS, cores_per_process(world_size, device))


def cores_per_process(world_size: int, device: torch.device) -> int:
    """The cores that this machine grants us, shared out."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # With a GPU each, there are at most as many processes on this machine as GPUs; the others are elsewhere.
    num_local = min(world_size, torch.cuda.device_count()) if device.type == "cuda" else world_size
    return max(1, num_cores // num_local)


def batch_source(
    config: Config, reader: TrainReader | EvalReader, world_size: int, device: torch.device
) -> Callable[[Iterable[Piece]], Iterator[Batch]]:
    """How pieces become batches, for images that are read one by one."""
    num_workers = count_workers(config.DATA, reader.image_set, world_size, device)
    return functools.partial(load_batches, reader=reader, num_workers=num_workers, device=device)
