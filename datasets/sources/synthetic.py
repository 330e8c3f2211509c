"""The data set `synthetic`: random images that are already on the device, to measure everything but data loading."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from configs.schema import Config
from datasets.image_set import ImageSet, Storage, Table
from datasets.order import Piece
from datasets.pixels.kinds import pixels_of
from datasets.targets.kinds import kind_of
from datasets.transforms.crop import BySize
from datasets.types import Batch

SYNTHETIC_CLASSES = 1000  # by default


class SyntheticStorage(Storage):
    """Random targets without images. SyntheticBatches makes the images."""

    in_memory = names_are_numbers = counts_in_part = True

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def name(self, row: int) -> str:
        return f"synthetic image {row}"

    def make_batches(
        self, images: ImageSet, config: Config, batch_size: int, rank: int, device: torch.device
    ) -> "SyntheticBatches":
        return SyntheticBatches(config, images, batch_size, rank, device)


class SyntheticBatches:
    """Random images for one batch, kept on the device. Every batch is a slice of them, without a copy or waiting."""

    def __init__(self, config: Config, image_set: ImageSet, batch_size: int, rank: int, device: torch.device):
        rng = np.random.default_rng([config.SEED, rank])
        count = min(batch_size, len(image_set))
        self.shapes = BySize(config, lambda sized: sized.DATA.shape)
        largest = max(config.train_shapes.values())
        shape = (count, *largest, config.DATA.IMAGE_CHANNELS)
        if pixels_of(config.DATA).dtype_in_batch == torch.uint8:
            pixels = rng.integers(256, size=shape, dtype=np.uint8)
        else:
            pixels = rng.random(shape, dtype=np.float32)  # the limits of DATA.RANGE are 0 and 1 in a batch
        self.images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
        self.targets = image_set.meaning.batch(image_set.targets[:count], len(image_set.classes)).to(device)

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for piece in pieces:
            count, shape = len(piece.indices), self.shapes.at(piece.epoch)
            images = self.images[:count, :, : shape.height, : shape.width]
            yield Batch(images, self.targets[:count], piece.num_samples, [], piece)


def read_synthetic(config: Config) -> tuple[Table, Table]:
    """Return a training and a validation set with the same targets."""
    images = invented_table(config)
    return images, images


def invented_table(config: Config) -> Table:
    """Return SYNTHETIC_SIZE random images. Their targets are class numbers or standardized numbers."""
    num_classes = config.MODEL.NUM_CLASSES or SYNTHETIC_CLASSES
    targets = np.random.default_rng(config.SEED).integers(num_classes, size=config.DATA.SYNTHETIC_SIZE)
    return Table(
        SyntheticStorage(len(targets)),
        targets,
        [str(number) for number in range(num_classes)],
        kind_of(config).invent(num_classes),
        split={"rule": "none", "training": "synthetic", "validation": "synthetic"},
    )


def invent(config: Config) -> ImageSet:
    """Return invented images that are finished, for trials."""
    return ImageSet.of(invented_table(config), pixels_of(config.DATA))
