"""Binary cross entropy: a yes or no for each class."""

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema import Train
from datasets import Mixed
from engine.precision import widen


class BinaryCrossEntropy:
    """Binary cross entropy as in timm, computed in float32 or better.

    With smoothing s, the target is 1 - s + s / classes for the image's class and s / classes for the others. If images
    can have several labels, smoothing moves all targets towards 0.5. Class weights multiply the positive term of each
    class, like timm's pos_weight. With TRAIN.BCE_TARGET_THRESH, targets above it are 1 and the others 0.
    """

    def __init__(self, settings: Train, class_weights: Tensor | None = None):
        """Prepare the loss. `class_weights` [classes] must be on the device of the logits."""
        self._settings, self._weights = settings, class_weights

    def __call__(self, logits: Tensor, targets: Tensor | Mixed) -> Tensor:
        logits, threshold = widen(logits), self._settings.BCE_TARGET_THRESH
        if isinstance(targets, Mixed):
            first, second = (self._soft(each, logits) for each in (targets.first, targets.second))
            soft = torch.lerp(second, first, targets.share.to(first.dtype)[:, None])
        else:
            soft = self._soft(targets, logits)
        if threshold is not None:
            soft = soft.gt(threshold).to(soft.dtype)
        weights = None if self._weights is None else self._weights.to(logits.dtype)
        losses = functional.binary_cross_entropy_with_logits(logits, soft, pos_weight=weights, reduction="none")
        return losses.mean(1).mean()

    def _soft(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Return smoothed targets [B, classes] for class numbers int64 [B] or for labels [B, classes] of 0 and 1."""
        smoothing = self._settings.SMOOTHING
        if targets.ndim == 2:
            return targets.to(logits.dtype) * (1 - smoothing) + 0.5 * smoothing
        low = smoothing / logits.shape[1]
        return torch.full_like(logits, low).scatter_(1, targets[:, None], 1 - smoothing + low)
