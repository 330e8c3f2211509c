"""Batches of patches: the readers that write them, their preparation on the model's device, and synthetic batches."""

import math
import random
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.loading.readers import Buffers, EvalReader, Reader, TrainReader
from datasets.native_aspect.grids import (
    GRID_BYTES,
    grids_of,
    length_of_piece,
    new_batch,
    pack,
    patch_of,
    pictures_of,
    set_grid,
    size_of,
    unpack,
)
from datasets.order import Piece, sample_rng
from datasets.pixels import resize, resize_with_pillow
from datasets.transforms.crop import BySize, Normalize, TrainTransform, crop_box
from datasets.transforms.erase_and_mix import ERASED_AREA, ERASED_RATIO
from datasets.transforms.preparation import copied
from datasets.types import Batch, ImageSet, Mixed
from models.native_aspect import patch_size_of
from utils.seed import keyed_rng

# --- reading: augmented and resized as timm's NaFlex transforms do ---


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
        interpolation = self.interpolation(rng)
        # torch's bilinear resize takes a quarter of the time of Pillow's, and its pixels differ by at most 1.
        (resize if interpolation == "bilinear" else resize_with_pillow)(image, interpolation, out)


class EvalSequenceTransform:
    """A resize of the whole image so that its patches fit the limit. Its pixels equal timm's."""

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


# --- the inputs of NaFlexVit, with erasing and mixing ---


Sequences = dict[str, Tensor]  # the dict that NaFlexVit takes


class PatchNormalize(Normalize):
    """Normalizes patches, uint8 [B, N + 1, P * P * C], and returns the dict that NaFlexVit takes."""

    def __init__(self, data: Data, dtype: torch.dtype = torch.float32):
        super().__init__(data, dtype)
        self.scale, self.shift = self.scale.flatten(), self.shift.flatten()  # channels are last in a patch

    def forward(self, images: Tensor, dtype: torch.dtype | None = None) -> Sequences:
        """Return {"patches": [B, N, P * P * C], "patch_coord": [B, N, 2], "patch_valid": [B, N]}.

        Images without a grid, which pad a batch, get a single patch: attention without any valid patch would be NaN.
        """
        pixels = images[:, :-1].unflatten(2, (-1, len(self.scale)))  # [B, N, P * P, C]
        patches = torch.empty(pixels.shape, dtype=dtype or self.dtype, device=images.device)
        torch.addcmul(self.shift, pixels, self.scale, out=patches)
        head = images[:, -1, :GRID_BYTES].to(torch.int64)
        rows, columns = (head[:, 0::2] + 256 * head[:, 1::2]).clamp_min(1)[:, None].unbind(2)  # [B, 1] each
        numbers = torch.arange(pixels.shape[1], device=images.device)
        valid = numbers < rows * columns  # [B, N]
        coord = torch.stack((numbers // columns, numbers % columns), 2)
        return {"patches": patches.flatten(2), "patch_coord": coord * valid[..., None], "patch_valid": valid}

    def pixels(self, images: Sequences) -> list[Tensor]:
        """Return the normalized images as uint8 [C, H, W] again, each in its own size."""
        values = images["patches"].unflatten(2, (-1, len(self.scale)))
        patches = ((values - self.shift) / self.scale).round().clamp(0, 255).to(torch.uint8).flatten(2)
        grids = (images["patch_coord"].amax(1) + 1).tolist()
        return [torch.from_numpy(each).permute(2, 0, 1) for each in pictures_of(patches, grids)]

    def mirrored(self, images: Sequences) -> Sequences:
        """Return the images mirrored from left to right."""
        patches, coord = images["patches"], images["patch_coord"]
        patch, channels = patch_of(patches.shape[2])
        columns = coord[..., 1].amax(1, keepdim=True) + 1
        # The index of the patch at the mirrored position. Patches of padding keep their index.
        numbers = torch.arange(coord.shape[1], device=coord.device)
        sources = torch.where(images["patch_valid"], coord[..., 0] * columns + columns - 1 - coord[..., 1], numbers)
        flipped = patches.unflatten(2, (patch, patch, channels)).flip(3).flatten(2)
        return images | {"patches": flipped.gather(1, sources[..., None].expand_as(flipped))}


class SequencePreparation:
    """Turns a loader's batch into the inputs of the model and the loss. The reader has already mixed the images."""

    def __init__(self, config: Config, normalize: PatchNormalize):
        self.normalize, self.device = normalize, normalize.scale.device
        patch = patch_size_of(config)
        self.boxes, self.mixing, self.erase = PatchBoxes(config), PatchMixing(config, patch), None
        if config.TRAIN.RANDOM_ERASE_PROB:
            self.erase = PatchErasing(config, self.device, patch * patch * config.DATA.IMAGE_CHANNELS)

    def __call__(self, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Sequences, Tensor | Mixed]:
        """Return the dict for the model and the targets [B], or Mixed. Patches have the type `dtype`."""
        targets = batch.targets.to(self.device, non_blocking=True)
        images = self.normalize(batch.images.to(self.device, non_blocking=True), dtype)
        is_mixed = batch.piece is not None and self.mixing.is_on(batch.piece)
        if batch.piece is None or not (self.erase or is_mixed):  # a batch that was made by hand has no piece
            return images, targets
        if batch.boxes is None:  # a saved or generated batch; the host waits for the device
            grids = grids_of(batch.images[:, -1:].cpu())
            shares = self.mixing.shares(self.mixing.draw(batch.piece, grids), grids)
            batch = batch._replace(boxes=self.boxes.draw(batch.piece, grids), shares=shares)
        if self.erase:
            rows = self.erase.rows(batch.boxes, images["patches"].shape[1])
            self.erase(images["patches"], copied(rows, self.device))
        if not is_mixed:
            return images, targets
        partners = (torch.arange(len(targets), device=self.device) ^ 1).clamp_max(len(targets) - 1)
        return images, Mixed(targets, targets[partners], copied(batch.shares, self.device))


# --- erasing ---


NUM_TRIES = 10  # attempts to draw a box that fits into the grid, as in timm
NUM_NOISE = 1024  # number of noise patches, which replace erased patches
NO_BOX = (0,) * 5


class PatchBoxes:
    """Draws the boxes to erase.

    A box is (number of its first patch, height and width in patches, columns of the image's grid, number of its first
    noise patch). In mode pixel, its other patches use the following noise patches; in mode rand, they use the same.
    """

    def __init__(self, config: Config):
        self.settings, self.seed = config.TRAIN, config.SEED
        self.is_on = bool(self.settings.RANDOM_ERASE_PROB)

    def draw(self, piece: Piece, grids: np.ndarray) -> np.ndarray:
        """Return the boxes of each image, int64 [B, RANDOM_ERASE_COUNT, 5], padded with NO_BOX.

        `grids`: height and width of each image in patches.
        """
        drawn = np.zeros((len(grids), self.settings.RANDOM_ERASE_COUNT, len(NO_BOX)), np.int64)
        if not self.is_on:
            return drawn
        for position, grid in enumerate(grids.tolist()):
            index, repeat = int(piece.indices[position]), int(piece.repeats[position])
            rng = sample_rng(self.seed, piece.epoch, index, "erasing", repeat)
            if rng.random() < self.settings.RANDOM_ERASE_PROB:
                # As in timm, the erased area is not divided among the boxes of an image.
                count = 1 + int(rng.random() * self.settings.RANDOM_ERASE_COUNT)
                drawn[position, :count] = [self._box(rng, *grid) for _ in range(count)]
        return drawn

    def _box(self, rng: random.Random, rows: int, columns: int) -> tuple[int, ...]:
        for _ in range(NUM_TRIES):
            area = rng.uniform(*ERASED_AREA) * rows * columns
            ratio = math.exp(rng.uniform(*map(math.log, ERASED_RATIO)))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < height <= rows and 0 < width <= columns:
                top, left = int(rng.random() * (rows - height + 1)), int(rng.random() * (columns - width + 1))
                return top * columns + left, height, width, columns, int(rng.random() * NUM_NOISE)
        return NO_BOX


class PatchErasing:
    """Fills the erased patches of a batch on its device, with a single operation."""

    def __init__(self, config: Config, device: torch.device, size: int):
        """Make the noise. `size`: the number of values in a patch."""
        self.mode, channels = config.TRAIN.RANDOM_ERASE_MODE, config.DATA.IMAGE_CHANNELS
        generator = torch.Generator().manual_seed(config.SEED)
        noise = torch.zeros(1, size)
        if self.mode == "rand":  # one random colour
            noise = torch.randn(NUM_NOISE, channels, generator=generator).repeat(1, size // channels)
        elif self.mode == "pixel":
            noise = torch.randn(NUM_NOISE, size, generator=generator)
        self.noise = noise.to(device)

    def rows(self, boxes: np.ndarray, length: int) -> np.ndarray:
        """Return the index of each erased patch in the batch and the index of its noise, int64 [2, M].

        `boxes`: the result of PatchBoxes.draw for images of `length` patches.
        """
        filled = np.full((len(boxes), length), -1)  # the noise of each patch; later boxes cover earlier ones
        for noise, of_image in zip(filled, boxes.tolist(), strict=True):
            for first, height, width, columns, start in of_image:
                patches = first + columns * np.arange(height)[:, None] + np.arange(width)
                numbers = start + np.arange(height * width).reshape(height, width) * (self.mode == "pixel")
                noise[patches] = numbers % len(self.noise)
        erased = np.flatnonzero(filled >= 0)
        return np.stack((erased, filled.ravel()[erased]))

    def __call__(self, patches: Tensor, rows: Tensor) -> None:
        """Erase patches [B, N, P * P * C] in place. `rows`: the result of self.rows, on the device of the patches."""
        patches.view(-1, patches.shape[-1])[rows[0]] = self.noise.to(patches.dtype)[rows[1]]


# --- mixing ---


class Mix(NamedTuple):
    """The part of an image that is mixed with its partner: a box in their central overlap, in pixels."""

    weight: float  # of the image itself (not of its partner) inside the box
    overlap: tuple[int, int]  # height and width
    top: int
    left: int
    height: int
    width: int

    def cut(self, pixels: Tensor) -> Tensor:
        """Return a view of the box in an image [H, W, C]."""
        top, left = ((side - inner) // 2 for side, inner in zip(pixels.shape[:2], self.overlap, strict=True))
        top, left = top + self.top, left + self.left
        return pixels[top : top + self.height, left : left + self.width]


class PatchMixing:
    """Mixes the images 2k and 2k + 1 of a window with each other. `Order` keeps both in the same piece.

    timm pairs the images of a batch by aspect ratio instead. That would make an update depend on how it is split.
    """

    def __init__(self, config: Config, patch: int):
        self.settings, self.seed, self.patch = config.TRAIN, config.SEED, patch

    def is_on(self, piece: Piece) -> bool:
        """Return whether images are mixed in the epoch of this piece."""
        is_off = self.settings.MIXUP_OFF_EPOCH and piece.epoch >= self.settings.MIXUP_OFF_EPOCH
        return bool(self.settings.mixes and not is_off)

    def draw(self, piece: Piece, grids: np.ndarray) -> list[Mix | None]:
        """Draw the mix of each image, None if it is not mixed. `grids`: height and width of each image in patches."""
        if not self.is_on(piece):
            return [None] * len(grids)
        drawn: list[Mix | None] = []
        for first in range(0, len(grids) - 1, 2):
            height, width = (int(each) * self.patch for each in grids[first : first + 2].min(axis=0))
            drawn += [self._draw(piece.step, piece.first + each, (height, width)) for each in (first, first + 1)]
        return drawn + [None] * (len(grids) % 2)

    def shares(self, mixes: list[Mix | None], grids: np.ndarray) -> np.ndarray:
        """Return the fraction of each mixed image that comes from the image itself, float32 [B]."""
        areas = (grids.prod(axis=1) * self.patch**2).tolist()
        return np.array(
            [
                1.0 if mix is None else 1 - (1 - mix.weight) * mix.height * mix.width / area
                for mix, area in zip(mixes, areas, strict=True)
            ],
            np.float32,
        )

    def mix(self, images: Tensor, mixes: list[Mix | None]) -> None:
        """Mix the images of a batch in place, uint8 [B, N + 1, P * P * C]."""
        grids = grids_of(images).tolist()
        for first in range(0, len(images) - 1, 2):
            if mixes[first] is None:
                continue
            pair = [unpack(images[each], grids[each], self.patch) for each in (first, first + 1)]
            # reshape() alone would not copy an image that is one patch wide.
            before = [each.reshape(each.shape[0] * self.patch, -1, each.shape[-1]).clone() for each in pair]
            for own, partner in ((0, 1), (1, 0)):
                mix, mixed = mixes[first + own], before[own].clone()
                ours, theirs = mix.cut(mixed), mix.cut(before[partner])
                ours.copy_(torch.lerp(theirs.float(), ours.float(), mix.weight).round_())
                pair[own].copy_(mixed.view(pair[own].shape))

    def _draw(self, step: int, position: int, overlap: tuple[int, int]) -> Mix | None:
        settings, (height, width) = self.settings, overlap
        # All images of a group use mixup, or all use cutmix, with the same weight. Each image has its own box.
        rng = keyed_rng("mixing", self.seed, step, position // (settings.MIXUP_GROUP or sys.maxsize))
        if rng.random() >= settings.MIXUP_PROB:
            return None
        has_both = settings.MIXUP_ALPHA and settings.CUTMIX_ALPHA
        is_cutmix = rng.random() < settings.MIXUP_SWITCH_PROB if has_both else bool(settings.CUTMIX_ALPHA)
        alpha = settings.CUTMIX_ALPHA if is_cutmix else settings.MIXUP_ALPHA
        weight = rng.betavariate(alpha, alpha)
        if not is_cutmix:
            return Mix(weight, overlap, 0, 0, height, width)
        own, side = keyed_rng("cutmix", self.seed, step, position), math.sqrt(1 - weight)
        inner = int(height * side), int(width * side)
        top, left = (int(own.random() * (outer - each + 1)) for outer, each in zip(overlap, inner, strict=True))
        return Mix(0.0, overlap, top, left, *inner)


# --- synthetic images ---


def blank_batch(config: Config, count: int, length: int) -> Tensor:
    """Return a batch of black images of `length` patches without padding."""
    batch = new_batch(count, length, patch_size_of(config), config.DATA.IMAGE_CHANNELS).zero_()
    rows = next(each for each in range(math.isqrt(length), 0, -1) if length % each == 0)
    set_grid(batch, rows, length // rows)
    return batch


class SyntheticSequences:
    """One batch of random images for each length, kept on the device. Every batch is a slice of one of them."""

    def __init__(self, config: Config, image_set: ImageSet, batch_size: int, rank: int, device: torch.device):
        self.config, self.rank, self.count, self.device = config, rank, min(batch_size, len(image_set)), device
        targets = image_set.targets[: self.count]
        self.targets = image_set.meaning.batch(targets, len(image_set.classes)).to(device)
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
