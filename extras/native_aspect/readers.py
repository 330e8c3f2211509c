"""Readers that write images as patches, augmented and resized as timm's NaFlex transforms do, and synthetic images."""

import math
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.loading.readers import Buffers, EvalReader, Reader, TrainReader
from datasets.order import Piece
from datasets.transforms.crop import BySize, TrainTransform, crop_box, resize, resize_with_pillow
from datasets.types import Batch, ImageSet
from extras.native_aspect.models import (
    grids_of,
    length_of_piece,
    lengths_of,
    new_batch,
    pack,
    patch_size_of,
    set_grid,
    size_of,
)
from extras.native_aspect.transforms import PatchBoxes, PatchMixing


class SequenceTransform(TrainTransform):
    """A random crop, resized so that its patches fit the output, with flips and augmentation."""

    def __init__(self, config: Config, patch: int):
        super().__init__(config)
        self.patch, self.cut = patch, self._resized

    def __call__(self, image: np.ndarray, rng: random.Random, out: Tensor) -> None:
        """Transform an image, uint8 [H, W, C], and write its patches to `out`, uint8 [N + 1, P * P * C]."""
        height, width, _ = image.shape
        # timm draws the aspect ratio of a crop relative to the aspect ratio of the image.
        ratio = tuple(each * width / height for each in self.data.CROP_RATIO)
        left, top, width, height = crop_box(width, height, self.data.CROP_SCALE, ratio, rng)
        image = image[top : top + height, left : left + width]
        pixels = new_image(image, size_of(height, width, self.patch, len(out) - 1))
        super().__call__(image, rng, pixels)
        pack(pixels, self.patch, out)

    def _resized(self, image: np.ndarray, rng: random.Random, out: Tensor) -> None:
        interpolation = self._interpolation(rng)
        # torch's bilinear resize takes a quarter of the time of Pillow's, and its pixels differ by at most 1.
        (resize if interpolation == "bilinear" else resize_with_pillow)(image, interpolation, out)


class EvalSequenceTransform:
    """A resize of the whole image so that its patches fit DATA.TOKENS. Its pixels equal timm's."""

    def __init__(self, config: Config, patch: int):
        self.interpolation, self.patch = config.DATA.INTERPOLATION, patch

    def __call__(self, image: np.ndarray, out: Tensor) -> None:
        """Transform an image, uint8 [H, W, C], and write its patches to `out`, uint8 [N + 1, P * P * C]."""
        pixels = new_image(image, size_of(*image.shape[:2], self.patch, len(out) - 1))
        resize_with_pillow(image, self.interpolation, pixels)
        pack(pixels, self.patch, out)


def new_image(image: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Return uninitialized memory for the resized image, uint8 [C, H, W] with channels last in memory."""
    return torch.empty((*size, image.shape[2]), dtype=torch.uint8).permute(2, 0, 1)


class SequenceReader(Reader):
    """Allocates batches of patches."""

    def __init__(self, image_set: ImageSet, config: Config):
        super().__init__(image_set, config)
        self.config, self.patch = config, patch_size_of(config)

    def allocate_images(self, piece: Piece, pinned: bool) -> Tensor:
        length = length_of_piece(self.config, piece)
        return new_batch(len(piece.indices), length, self.patch, self.data.IMAGE_CHANNELS, pinned)


class TrainSequenceReader(SequenceReader, TrainReader):
    """Reads training images as patches, mixes pairs of them, and draws the boxes to erase."""

    def __init__(self, image_set: ImageSet, config: Config):
        super().__init__(image_set, config)
        self.transforms = BySize(config, lambda sized: SequenceTransform(sized, self.patch))
        self.boxes = None  # drawn in `batch`
        self.erasing, self.mixing = PatchBoxes(config), PatchMixing(config, self.patch)

    def batch(self, piece: Piece, buffers: Buffers, bad: list[int]) -> Batch:
        """Mix the images, and draw the boxes to erase."""
        batch = super().batch(piece, buffers, bad)
        if not (self.erasing.is_on or self.mixing.is_on(piece)):
            return batch
        grids = grids_of(buffers.images)
        mixes = self.mixing.draw(piece, grids)
        self.mixing.mix(buffers.images, mixes)
        return batch._replace(boxes=self.erasing.draw(piece, grids), shares=self.mixing.shares(mixes, grids))


class EvalSequenceReader(SequenceReader, EvalReader):
    """Reads validation images as patches."""

    def __init__(self, image_set: ImageSet, config: Config):
        super().__init__(image_set, config)
        self.transform = EvalSequenceTransform(config, self.patch)


# --- synthetic images ---


def blank_batch(config: Config, count: int, length: int | None = None) -> Tensor:
    """Return a batch of black images of `length` patches without padding, by default the largest training length."""
    length = length or max(lengths_of(config.DATA))
    batch = new_batch(count, length, patch_size_of(config), config.DATA.IMAGE_CHANNELS).zero_()
    rows = next(each for each in range(math.isqrt(length), 0, -1) if length % each == 0)
    set_grid(batch, rows, length // rows)
    return batch


class SyntheticSequences:
    """One batch of random images for each length, kept on the device. Every batch is a slice of one of them."""

    def __init__(self, config: Config, image_set: ImageSet, batch_size: int, rank: int, device: torch.device):
        self.config, self.rank, self.count, self.device = config, rank, min(batch_size, len(image_set)), device
        self.targets = torch.from_numpy(image_set.targets[: self.count]).to(device)
        self.images: dict[int, Tensor] = {}  # {length: batch}

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for piece in pieces:
            count, length = len(piece.indices), length_of_piece(self.config, piece)
            if length not in self.images:
                rng = np.random.default_rng([self.config.SEED, self.rank, length])
                images = blank_batch(self.config, self.count, length)
                images[:, :-1] = torch.from_numpy(rng.integers(256, size=images[:, :-1].shape, dtype=np.uint8))
                self.images[length] = images.to(self.device)
            yield Batch(self.images[length][:count], self.targets[:count], piece.num_samples, [], piece)
