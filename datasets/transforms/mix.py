"""Mixup and cutmix: random draws on the host, and the mixing of a batch on its device."""

import math
import random
import sys

import torch
from torch import Tensor

from configs.schema import Config
from datasets.order import Piece
from datasets.transforms.crop import inside_box
from datasets.transforms.mixed import Mixed
from utils.seed import keyed_rng

UNMIXED = (1.0, 0.0, 0.0, 0.0, 0.0)  # weight and box of an image that is not mixed


class Mixing:
    """Mixup and cutmix of the neighbours 2k and 2k + 1 in the window. `Order` keeps neighbours in one piece.

    A last image without a neighbour is not mixed.
    """

    def __init__(self, config: Config):
        self.settings, self.seed, self.side = config.TRAIN, config.SEED, config.DATA.IMAGE_SIZE

    def is_on(self, piece: Piece) -> bool:
        return not self.settings.MIXUP_OFF_EPOCH or piece.epoch < self.settings.MIXUP_OFF_EPOCH

    def rows(self, piece: Piece) -> list[tuple[float, ...]]:
        """Return for each image: its partner's position, its own weight outside of the partner's box, and that box."""
        count = len(piece.indices)
        positions = range(piece.first, piece.first + count)
        group = self.settings.MIXUP_GROUP or sys.maxsize
        units = {
            "batch": [each // group for each in positions],
            "pair": [each // 2 for each in positions],
            "elem": positions,
        }
        units = units[self.settings.MIXUP_MODE]
        draws = {unit: self._draw(piece.step, unit) for unit in set(units)}
        rows = [(float(position ^ 1), *draws[unit]) for position, unit in enumerate(units)]
        if count % 2:
            rows[-1] = (count - 1.0, *UNMIXED)
        return rows

    def __call__(self, images: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """Mix images [B, C, H, W] according to the table [B, 6] from `rows`, and round the result to `dtype`."""
        _, factor, *box = table.unbind(1)
        weight = torch.where(inside_box(*box, self.side), 0.0, factor[:, None, None, None]).to(images.dtype)
        mixed, paired = torch.empty_like(images, dtype=dtype), len(images) // 2 * 2
        first, second = slice(0, paired, 2), slice(1, paired, 2)
        for own, partner in ((first, second), (second, first)):  # slices, because images[partners] would copy the batch
            lerp_into(mixed[own], images[partner], images[own], weight[own])
        mixed[paired:] = images[paired:]
        return mixed

    def targets(self, targets: Tensor, table: Tensor) -> Mixed:
        """Return each image's target, its partner's target, and the weight of the image's target."""
        partners, factor, _, _, width, height = table.unbind(1)
        return Mixed(targets, targets[partners.long()], factor * (1 - width * height / self.side**2))

    def _draw(self, step: int, unit: int) -> tuple[float, ...]:
        """Draw an image's own weight outside of its partner's box, and that box: left, top, width, height."""
        settings, rng = self.settings, keyed_rng("mixing", self.seed, step, unit)
        cutmix_alpha = 1.0 if settings.CUTMIX_MINMAX else settings.CUTMIX_ALPHA
        if rng.random() >= settings.MIXUP_PROB:
            return UNMIXED
        if not settings.MIXUP_ALPHA or (cutmix_alpha and rng.random() < settings.MIXUP_SWITCH_PROB):
            return 1.0, *self._box(rng.betavariate(cutmix_alpha, cutmix_alpha), rng)
        return rng.betavariate(settings.MIXUP_ALPHA, settings.MIXUP_ALPHA), 0.0, 0.0, 0.0, 0.0

    def _box(self, share: float, rng: random.Random) -> tuple[float, ...]:
        """Draw a box with a random centre and 1 - `share` of the image's area, and clip it to the image.

        With CUTMIX_MINMAX, draw a box of random size inside the image instead.
        """
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


def lerp_into(out: Tensor, start: Tensor, end: Tensor, weight: Tensor) -> None:
    if out.dtype == start.dtype and not torch.compiler.is_compiling():
        # `out=` avoids a copy, but cannot change the type or write to a slice in a compiled graph.
        torch.lerp(start, end, weight, out=out)
    else:
        out.copy_(torch.lerp(start, end, weight))
