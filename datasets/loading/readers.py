"""From a piece of the order to a batch of images, filled one by one, so that several threads can share a piece."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.batch_order import Piece, sample_rng
from datasets.transforms.augment import build_augmentation
from datasets.transforms.crop import EvalTransform, TrainTransform
from datasets.types import Batch, ImageReadError, ImageSet
from utils.errors import DataError

NUM_REPLACEMENTS = 8  # images tried in place of an unreadable one: first of its class, then as many of any class


class Reader:
    """Reads images into a batch. Several threads may call `fill` at once for different positions of one piece."""

    def __init__(self, image_set: ImageSet, config: Config):
        self.image_set, self.data, self.seed = image_set, config.DATA, config.SEED

    def allocate(self, piece: Piece, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Uninitialized images, in the memory layout of decoded pixels, and targets.

        Pinned memory costs milliseconds only at first: torch gives it out again once the copies from it are done.
        """
        count, side = len(piece.indices), self.data.IMAGE_SIZE
        images = torch.empty((count, side, side, self.data.IMAGE_CHANNELS), dtype=torch.uint8, pin_memory=pinned)
        return images.permute(0, 3, 1, 2), torch.empty(count, dtype=torch.int64, pin_memory=pinned)

    def fill(self, piece: Piece, positions: range, images: Tensor, targets: Tensor) -> list[int]:
        """Read the images at these positions of a piece. Returns the unreadable ones."""
        raise NotImplementedError

    def batch(self, piece: Piece, images: Tensor, targets: Tensor, bad: list[int]) -> Batch:
        """The batch of a piece whose positions are all filled."""
        raise NotImplementedError

    def __getitem__(self, piece: Piece) -> Batch | DataError:
        """The batch of a piece. A DataError is returned, so that it leaves a worker process unchanged."""
        images, targets = self.allocate(piece)
        try:
            bad = self.fill(piece, range(len(piece.indices)), images, targets)
        except DataError as error:
            return error
        return self.batch(piece, images, targets, bad)


class TrainReader(Reader):
    """Augments the images, and replaces an unreadable one by another."""

    def __init__(self, image_set: ImageSet, config: Config):
        super().__init__(image_set, config)
        self.transform = TrainTransform(config.DATA, build_augmentation(config))

    def fill(self, piece: Piece, positions: range, images: Tensor, targets: Tensor) -> list[int]:
        bad: list[int] = []
        for position in positions:
            index, repeat = int(piece.indices[position]), int(piece.repeats[position])
            image, used = self._read_or_replace(piece.epoch, index, bad)
            self.transform(image, sample_rng(self.seed, piece.epoch, index, repeat=repeat), images[position])
            targets[position] = int(self.image_set.targets[used])
        return bad

    def batch(self, piece: Piece, images: Tensor, targets: Tensor, bad: list[int]) -> Batch:
        return Batch(images, targets, piece.num_samples, bad, piece)

    def _read_or_replace(self, epoch: int, index: int, bad: list[int]) -> tuple[np.ndarray, int]:
        """The image and its index, or those of its replacement. Unreadable ones are added to `bad`."""
        for candidate in self._candidates(epoch, index):
            try:
                return self.image_set.read(candidate), candidate
            except ImageReadError as error:
                reason = error
                bad.append(candidate)
        raise DataError(
            f"{self.image_set.name(index)} cannot be read, nor can {2 * NUM_REPLACEMENTS} others ({reason}); "
            "check that DATA.DATA_PATH is still available"
        )

    def _candidates(self, epoch: int, index: int) -> Iterator[int]:
        yield index
        rng = sample_rng(self.seed, epoch, index, "replacement")
        targets = self.image_set.targets
        for pool in (np.flatnonzero(targets == targets[index]), range(len(targets))):
            for _ in range(NUM_REPLACEMENTS):
                yield int(pool[int(rng.random() * len(pool))])


class EvalReader(Reader):
    """Omits unreadable images, and reports them in the batch."""

    def __init__(self, image_set: ImageSet, config: Config):
        super().__init__(image_set, config)
        self.transform = EvalTransform(config.DATA)

    def fill(self, piece: Piece, positions: range, images: Tensor, targets: Tensor) -> list[int]:
        bad: list[int] = []
        for position in positions:
            index = int(piece.indices[position])
            try:
                self.transform(self.image_set.read(index), images[position])
            except ImageReadError:
                bad.append(index)
            targets[position] = int(self.image_set.targets[index])
        return bad

    def batch(self, piece: Piece, images: Tensor, targets: Tensor, bad: list[int]) -> Batch:
        if bad:
            readable = torch.from_numpy(~np.isin(piece.indices, bad))
            images, targets = images[readable], targets[readable]
        is_counted = piece.num_samples > 0
        return Batch(images, targets, len(images) if is_counted else 0, bad if is_counted else [])
