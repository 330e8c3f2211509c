"""What training makes small."""

import torch
from torch.nn import functional

from configs.schema import Train


class ClassificationLoss:
    """Cross entropy with label smoothing, computed in float32 or better whatever the logits are in."""

    def __init__(self, settings: Train):
        self._smoothing = settings.SMOOTHING

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return functional.cross_entropy(widen(logits), targets, reduction=reduction, label_smoothing=self._smoothing)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Half to float32; float32 and float64 as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
