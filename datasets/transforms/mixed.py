"""Targets of images that are each mixed from two."""

from typing import NamedTuple

import torch
from torch import Tensor


class Mixed(NamedTuple):
    """Targets of images that are each mixed from two."""

    first: Tensor  # int64 [B], the class of the image itself
    second: Tensor  # int64 [B], the class of its partner
    share: Tensor  # float32 [B], the weight of the first in [0, 1]


def dominant_class(targets: Tensor | Mixed) -> Tensor:
    """One class for each image, for training accuracy: that of the part with the larger weight; of several its labels."""
    if not isinstance(targets, Mixed):
        return targets
    is_first = targets.share >= 0.5
    return torch.where(is_first if targets.first.ndim == 1 else is_first[:, None], targets.first, targets.second)
