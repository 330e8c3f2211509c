"""The training loss."""

import torch
from torch.nn import functional

from configs.schema import Train
from datasets import Mixed


class ClassificationLoss:
    """Cross entropy with label smoothing, in float32 or better for any type of logits.

    For a mixed image, the losses of its two classes weighted by their shares, which equals a soft target.
    """

    def __init__(self, settings: Train):
        self._smoothing = settings.SMOOTHING

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor | Mixed) -> torch.Tensor:
        logits = widen(logits)
        if isinstance(targets, Mixed):
            first, second = (self._cross_entropy(logits, each, "none") for each in (targets.first, targets.second))
            return torch.lerp(second, first, targets.share.to(first.dtype)).mean()
        return self._cross_entropy(logits, targets, "mean")

    def _cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.cross_entropy(logits, targets, reduction=reduction, label_smoothing=self._smoothing)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half types to float32; float32 and float64 stay."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
