"""Mixup and cutmix of images of different sizes: as in timm's NaFlexMixup, only their central overlap is mixed."""

import math
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.order import Piece
from extras.native_aspect.grids import grids_of, unpack
from utils.seed import keyed_rng


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
