"""Transforms of a micro-batch on its device: normalization, random erasing, mixup and cutmix of pairs.

They depend on seed, epoch, step, image and position in the window, never on how the window is split.
"""

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

from configs.schema import Config
from datasets.batch_order import Piece, sample_rng
from datasets.transforms.crop import Normalize, crop_box
from datasets.types import Batch
from utils.seed import keyed_rng

ERASED_AREA = (0.02, 1 / 3)  # fraction of the image
ERASED_RATIO = (0.3, 1 / 0.3)  # width over height
UNMIXED = (1.0, 0.0, 0.0, 0.0, 0.0)  # factor and box of an image that is not mixed


class Mixed(NamedTuple):
    """Targets of images that are each mixed from two."""

    first: Tensor  # int64 [B], the class of the image itself
    second: Tensor  # int64 [B], the class of its partner
    share: Tensor  # float32 [B], the weight of the first in [0, 1]


def dominant_class(targets: Tensor | Mixed) -> Tensor:
    """One class for each image, for training accuracy: that of the part with the larger weight."""
    return torch.where(targets.share >= 0.5, targets.first, targets.second) if isinstance(targets, Mixed) else targets


class Preparation:
    """From a batch of the loader to the inputs of model and loss, on the device of `normalize`."""

    def __init__(self, config: Config, normalize: Normalize):
        self.normalize = normalize
        self.device = normalize.scale.device
        self.erase = Erasing(config, self.device) if config.TRAIN.RANDOM_ERASE_PROB else None
        self.mix = Mixing(config) if config.TRAIN.mixes else None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | Mixed]:
        """Images [B, C, H, W] and targets [B]. Never makes the host wait."""
        images = self.normalize(batch.images.to(self.device, non_blocking=True))
        targets = batch.targets.to(self.device, non_blocking=True)
        if self.erase and batch.piece:
            self.erase(images, batch.piece)
        if self.mix and batch.piece:
            return self.mix(images, targets, batch.piece)
        return images, targets


class Erasing:
    """Random erasing: fills boxes of some images with noise, a random colour or the mean colour."""

    def __init__(self, config: Config, device: torch.device):
        self.settings, self.seed, self.side = config.TRAIN, config.SEED, config.DATA.IMAGE_SIZE
        # Noise is cut from one large piece at random positions: numbers drawn on the device would depend on the split.
        shape = (config.DATA.IMAGE_CHANNELS, 2 * self.side, 2 * self.side)
        self.noise = torch.randn(shape, generator=torch.Generator().manual_seed(config.SEED)).to(device)

    def __call__(self, images: Tensor, piece: Piece) -> None:
        """In place."""
        for image, index, repeat in zip(images, piece.indices.tolist(), piece.repeats.tolist(), strict=True):
            rng = sample_rng(self.seed, piece.epoch, index, "erasing", repeat)
            if rng.random() < self.settings.RANDOM_ERASE_PROB:
                for left, top, width, height in self.boxes(rng):
                    image[:, top : top + height, left : left + width] = self._filling(width, height, rng)

    def boxes(self, rng: random.Random) -> list[tuple[int, int, int, int]]:
        """left, top, width and height of the boxes of one image."""
        count = 1 + int(rng.random() * self.settings.RANDOM_ERASE_COUNT)
        area = (ERASED_AREA[0] / count, ERASED_AREA[1] / count)
        return [crop_box(self.side, self.side, area, ERASED_RATIO, rng) for _ in range(count)]

    def _filling(self, width: int, height: int, rng: random.Random) -> Tensor | float:
        mode = self.settings.RANDOM_ERASE_MODE
        if mode == "const":
            return 0.0
        if mode == "rand":
            width = height = 1
        left, top = int(rng.random() * self.side), int(rng.random() * self.side)
        return self.noise[:, top : top + height, left : left + width]


class Mixing:
    """Mixup and cutmix of the neighbours 2k and 2k + 1 in the window, which `Order` keeps in one piece.

    A last image without a neighbour is not mixed.
    """

    def __init__(self, config: Config):
        self.settings, self.seed, self.side = config.TRAIN, config.SEED, config.DATA.IMAGE_SIZE

    def __call__(self, images: Tensor, targets: Tensor, piece: Piece) -> tuple[Tensor, Tensor | Mixed]:
        """Mixed images [B, C, H, W], and the targets of both parts."""
        if self.settings.MIXUP_OFF_EPOCH and piece.epoch >= self.settings.MIXUP_OFF_EPOCH:
            return images, targets
        # One table, so that one copy transfers all numbers to the device.
        table = torch.tensor(self._rows(piece), pin_memory=images.is_cuda).to(images.device, non_blocking=True)
        partners, factor, left, top, width, height = table.unbind(1)
        partners = partners.long()
        pixels = torch.arange(self.side, device=images.device)
        across = (pixels >= left[:, None]) & (pixels < (left + width)[:, None])  # [B, W]
        down = (pixels >= top[:, None]) & (pixels < (top + height)[:, None])  # [B, H]
        inside = down[:, None, :, None] & across[:, None, None, :]
        weight = torch.where(inside, 0.0, factor[:, None, None, None]).to(images.dtype)  # [B, 1, H, W]
        share = factor * (1 - width * height / self.side**2)
        return torch.lerp(images[partners], images, weight), Mixed(targets, targets[partners], share)

    def _rows(self, piece: Piece) -> list[tuple[float, ...]]:
        """For each image its partner's position, its own factor outside the partner's box, and that box."""
        count = len(piece.indices)
        positions = range(piece.first, piece.first + count)
        units = {"batch": [0] * count, "pair": [each // 2 for each in positions], "elem": positions}
        units = units[self.settings.MIXUP_MODE]
        draws = {unit: self._draw(piece.step, unit) for unit in set(units)}
        rows = [(float(position ^ 1), *draws[unit]) for position, unit in enumerate(units)]
        if count % 2:
            rows[-1] = (count - 1.0, *UNMIXED)
        return rows

    def _draw(self, step: int, unit: int) -> tuple[float, ...]:
        """Factor and box: left, top, width, height."""
        settings, rng = self.settings, keyed_rng("mixing", self.seed, step, unit)
        cutmix_alpha = 1.0 if settings.CUTMIX_MINMAX else settings.CUTMIX_ALPHA
        if rng.random() >= settings.MIXUP_PROB:
            return UNMIXED
        if not settings.MIXUP_ALPHA or (cutmix_alpha and rng.random() < settings.MIXUP_SWITCH_PROB):
            return 1.0, *self._box(rng.betavariate(cutmix_alpha, cutmix_alpha), rng)
        return rng.betavariate(settings.MIXUP_ALPHA, settings.MIXUP_ALPHA), 0.0, 0.0, 0.0, 0.0

    def _box(self, share: float, rng: random.Random) -> tuple[float, ...]:
        """A box with 1 - `share` of the area around a random centre, clipped; with CUTMIX_MINMAX fully inside."""
        side = self.side
        if self.settings.CUTMIX_MINMAX:
            low, high = self.settings.CUTMIX_MINMAX
            width, height = (round(side * (low + (high - low) * rng.random())) for _ in range(2))
            return int(rng.random() * (side - width + 1)), int(rng.random() * (side - height + 1)), width, height
        cut = int(side * math.sqrt(1 - share))
        starts = [int(rng.random() * side) - cut // 2 for _ in range(2)]
        left, top = (max(start, 0) for start in starts)
        right, bottom = (min(start + cut, side) for start in starts)
        return left, top, right - left, bottom - top
