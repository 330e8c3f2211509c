"""`synthetic`: random images that are already on the device, to measure everything but data loading."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy

import numpy as np
import torch

from configs.schema import Config
from datasets.order import Piece
from datasets.transforms.crop import BySize
from datasets.types import Batch, ImageSet

DEFAULT_CLASSES = 1000


class SyntheticImages(ImageSet):
    """A set of random targets without images. SyntheticBatches makes the images."""

    in_memory = names_are_numbers = labels_are_numbers = True

    def makes_batches(self, config: Config, batch_size: int, rank: int, device: torch.device) -> Callable:
        if config.DATA.TOKENS:
            from extras.native_aspect.readers import SyntheticSequences

            return SyntheticSequences(config, self, batch_size, rank, device)
        return SyntheticBatches(config, self, batch_size, rank, device)

    def name(self, index: int) -> str:
        return f"synthetic image {index}"


class SyntheticBatches:
    """Random images for one batch, kept on the device. Every batch is a slice of them, without a copy or waiting."""

    def __init__(self, config: Config, image_set: ImageSet, batch_size: int, rank: int, device: torch.device):
        rng = np.random.default_rng([config.SEED, rank])
        count = min(batch_size, len(image_set))
        side, self.sides = config.largest_train_side, BySize(config, lambda sized: sized.DATA.IMAGE_SIZE)
        pixels = rng.integers(256, size=(count, side, side, config.DATA.IMAGE_CHANNELS), dtype=np.uint8)
        self.images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
        self.targets = torch.from_numpy(image_set.targets[:count]).to(device)

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for piece in pieces:
            count, side = len(piece.indices), self.sides.at(piece.epoch)
            yield Batch(self.images[:count, :, :side, :side], self.targets[:count], piece.num_samples, [], piece)


def read_synthetic(config: Config, say: Callable = print) -> tuple[ImageSet, ImageSet]:
    """Return a training and a validation set with the same SYNTHETIC_SIZE random targets."""
    num_classes = config.MODEL.NUM_CLASSES or DEFAULT_CLASSES
    targets = np.random.default_rng(config.SEED).integers(num_classes, size=config.DATA.SYNTHETIC_SIZE)
    image_set = SyntheticImages(targets, [str(number) for number in range(num_classes)])
    image_set.split = {"rule": "none", "training": "synthetic", "validation": "synthetic"}
    return image_set, copy(image_set)
