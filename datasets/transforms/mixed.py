"""Targets of images that are each mixed from two images."""

from typing import NamedTuple

import torch
from torch import Tensor


class Mixed(NamedTuple):
    """The targets of images that are each mixed from two images."""

    first: Tensor  # int64 [B], the class of the image itself
    second: Tensor  # int64 [B], the class of its partner
    share: Tensor  # float32 [B], the weight of `first` in [0, 1]


def dominant_class(targets: Tensor | Mixed) -> Tensor:
    """Return for each image the target with the larger weight, to measure the training accuracy."""
    if not isinstance(targets, Mixed):
        return targets
    is_first = targets.share >= 0.5
    return torch.where(is_first if targets.first.ndim == 1 else is_first[:, None], targets.first, targets.second)
