"""Images in memory: `digits`, which are part of halfstep (source and licence: DIGITS.md), and `synthetic`.

`synthetic` images are random and already on the device, to measure everything but data loading.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from configs.schema import Config
from datasets.order import Piece
from datasets.transforms.crop import BySize
from datasets.transforms.pixel_rules import PixelRules, to_array
from datasets.types import Batch, ImageSet

DIGITS = Path(__file__).with_name("digits.npz")
BRIGHTEST = 16  # the highest pixel value in the file
VAL_FRACTION = 0.2  # fixed, so that accuracies are comparable
SYNTHETIC_CLASSES = 1000  # by default


class ArrayImages(ImageSet):
    """Images in memory: uint8 [N, H, W] or [N, H, W, 3]."""

    in_memory = names_are_numbers = True

    def __init__(self, images: np.ndarray, targets: np.ndarray, classes: list[str], rules: PixelRules, title: str):
        super().__init__(targets, classes)
        self.images, self.rules, self.title = images, rules, title

    def name(self, index: int) -> str:
        return f"{self.title} image {index}"

    def table_name(self, index: int) -> str:
        return f"{self.title} image #{self.row(index)}"

    def read(self, index: int) -> np.ndarray:
        pixels = self.images[self.row(index)]
        if pixels.ndim == 3 and pixels.shape[2] == self.rules.num_channels:
            return pixels
        return to_array(Image.fromarray(pixels), self.rules)


def read_digits(config: Config, say: Callable = print) -> tuple[ImageSet, None]:
    """Return all 1,797 handwritten digits. 20% of each class, or a fold, will be held out. DATA_PATH is not used."""
    with np.load(DIGITS, allow_pickle=False) as content:
        images, targets = content["images"], content["targets"]
    images = np.round(images * (255 / BRIGHTEST)).astype(np.uint8)
    classes = [str(digit) for digit in range(10)]
    image_set = ArrayImages(images, targets, classes, PixelRules.of(config.DATA), "digits")
    image_set.split = {"rule": "position", "training": "digits", "fraction": VAL_FRACTION}
    return image_set, None


# --- synthetic ---


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
    num_classes = config.MODEL.NUM_CLASSES or SYNTHETIC_CLASSES
    targets = np.random.default_rng(config.SEED).integers(num_classes, size=config.DATA.SYNTHETIC_SIZE)
    image_set = SyntheticImages(targets, [str(number) for number in range(num_classes)])
    image_set.split = {"rule": "none", "training": "synthetic", "validation": "synthetic"}
    return image_set, copy(image_set)
