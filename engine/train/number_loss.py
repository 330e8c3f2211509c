"""The training losses of numbers."""

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema import Train
from datasets import Mixed
from engine.precision import widen

NUMBER_LOSSES = {"smooth_l1": functional.smooth_l1_loss, "l1": functional.l1_loss, "mse": functional.mse_loss}


class NumberLoss:
    """The loss of standardized numbers, computed in float32 or better. Missing numbers, which are NaN, have no loss.

    The loss of an image is the sum over its numbers, divided by the number of outputs.
    """

    def __init__(self, settings: Train, class_weights: Tensor | None = None):
        self._loss = NUMBER_LOSSES[settings.LOSS]

    def __call__(self, outputs: Tensor, targets: Tensor | Mixed) -> Tensor:
        """Return the mean over the images. A mixed image has the mixed number."""
        if isinstance(targets, Mixed):
            first, share = targets.first, targets.share.to(targets.first)[:, None]
            mixed = torch.lerp(targets.second, first, share)
            targets = torch.where(share == 1, first, mixed)  # the number of a partner without a share may be missing
        return self.of_images(outputs, targets).mean()

    def of_images(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image: [B]."""
        outputs = widen(outputs)
        is_present = targets.isfinite()
        # A masked NaN would still have a gradient of NaN.
        known = torch.where(is_present, targets.to(outputs.dtype), outputs.detach())
        return self._loss(outputs, known, reduction="none").mean(1)
