"""Transforms of a micro-batch on its device: normalization, random erasing, mixup and cutmix of pairs.

The results depend on seed, epoch, step, image and position in the window, but never on how the window is split.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets.transforms.crop import BySize, Normalize
from datasets.types import Batch, Mixed
from utils.host import has_streams


def dominant_class(targets: Tensor | Mixed) -> Tensor:
    """Return for each image the target with the larger weight, to measure the training accuracy."""
    if not isinstance(targets, Mixed):
        return targets
    is_first = targets.share >= 0.5
    return torch.where(is_first if targets.first.ndim == 1 else is_first[:, None], targets.first, targets.second)


class Preparation:
    """Turns a loader's batch into the inputs of model and loss, on the device of `normalize`."""

    def __init__(self, config: Config, normalize: Normalize, is_compiled: bool = False):
        """Build the transforms. If `is_compiled`, compile them to one kernel per batch size."""
        self.normalize = normalize
        self.device = normalize.scale.device
        self.copy = functools.partial(copied, device=self.device)
        self.erase = self.mix = None
        if config.TRAIN.RANDOM_ERASE_PROB:
            from datasets.transforms.erase_and_mix import BatchedErasing, Erasing

            self.erase = (Erasing if self.device.type == "cpu" else BatchedErasing)(config, self.device)
        if config.TRAIN.mixes:
            from datasets.transforms.erase_and_mix import Mixing

            self.mix = Mixing(config)
        if is_compiled:
            self.compute = torch.compile(self.compute, dynamic=False)

    def __call__(self, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | Mixed]:
        """Return images [B, C, H, W] and targets [B], without making the host wait.

        The images have the type `dtype`, by default the type of `normalize`.
        """
        pixels = batch.images.to(self.device, non_blocking=True)
        targets = batch.targets.to(self.device, non_blocking=True)
        piece, boxes = batch.piece, None
        # Erasing and mixing need a piece. A batch that was made by hand has none, and skips both.
        if self.erase and piece:
            boxes = self.copy(self.erase.rows(piece) if batch.boxes is None else batch.boxes)
        parts = self.copy(self.mix.rows(piece)) if self.mix and piece and self.mix.is_on(piece) else None
        images = self.compute(pixels, boxes, parts, dtype or self.normalize.dtype)
        return images, targets if parts is None else self.mix.targets(targets, parts)

    def compute(self, pixels: Tensor, boxes: Tensor | None, parts: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Normalize, erase and mix. `boxes` and `parts` are the host's random draws, or None to skip a step.

        The images are rounded to `dtype` once, after mixing.
        """
        images = self.normalize(pixels, dtype if parts is None else None)
        if boxes is not None:
            images = self.erase(images, boxes)
        return images if parts is None else self.mix(images, parts, dtype)


class SizedPreparation:
    """A preparation for each size of training images. The epoch of a batch selects the size."""

    def __init__(self, config: Config, normalize: Normalize, is_compiled: bool = False):
        self.normalize, self.device = normalize, normalize.scale.device
        self.by_size = BySize(config, lambda sized: Preparation(sized, normalize, is_compiled))

    def __call__(self, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | Mixed]:
        return self.by_size.at(batch.piece.epoch if batch.piece else 0)(batch, dtype)


def copied(rows: Sequence | np.ndarray, device: torch.device) -> Tensor:
    """Return the rows of all images of a batch on the device, with a single copy for which the host does not wait."""
    host = torch.tensor(rows)  # torch.tensor cannot pin what it reads from numpy
    return (host.pin_memory() if has_streams(device) else host).to(device, non_blocking=True)
