"""The training loss, with label smoothing, mixed targets and class weights.

The sum of the losses is divided by the number of images, never by the sum of the class weights, so the loss of an
update does not depend on its split into micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema import Config, Train
from datasets import Mixed
from engine.precision import widen

Loss = Callable[[Tensor, Tensor | Mixed], Tensor]  # (logits [B, classes], targets) -> mean over the images


def build_loss(
    config: Config, class_weights: Sequence[float] | None = None, device: torch.device | None = None
) -> Loss:
    """Build the loss that TRAIN.LOSS names, by its row in configs/tables.py.

    `class_weights` come from datasets.balance. None: all classes have the same weight. `device` is the logits' device.
    """
    weights = None if class_weights is None else torch.tensor(class_weights).to(device)
    return loss_class(config.TRAIN.LOSS)(config.TRAIN, weights)


def loss_class(name: str) -> type:
    """Return the class of a loss in LOSSES. Its arguments: the settings of the training, the class weights."""
    match name:
        case "bce":
            from engine.train.binary_loss import BinaryCrossEntropy

            return BinaryCrossEntropy
        case "smooth_l1" | "l1" | "mse":
            from engine.train.number_loss import NumberLoss

            return NumberLoss
    return CrossEntropy


class CrossEntropy:
    """Cross entropy with TRAIN.SMOOTHING, computed in float32 or better for any type of logits.

    The losses of a mixed image's two classes are weighted by their shares, which is equivalent to a soft target. With
    class weights w, the loss of an image is the sum of -w[c] target[c] log p[c] over the classes c.
    """

    def __init__(self, settings: Train, class_weights: Tensor | None = None):
        """Prepare the loss. `class_weights` [classes] must be on the device of the logits."""
        self._smoothing, self._weights = settings.SMOOTHING, class_weights

    def __call__(self, logits: Tensor, targets: Tensor | Mixed) -> Tensor:
        logits = widen(logits)
        weights = None if self._weights is None else self._weights.to(logits.dtype)
        if isinstance(targets, Mixed):
            first, second = (self._of_each(logits, each, weights) for each in (targets.first, targets.second))
            return torch.lerp(second, first, targets.share.to(first.dtype)).mean()
        if weights is None:
            return functional.cross_entropy(logits, targets, label_smoothing=self._smoothing)
        return self._of_each(logits, targets, weights).mean()

    def _of_each(self, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        smoothing = self._smoothing
        return functional.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=smoothing)


@dataclass(frozen=True)
class DistillationTargets:
    """The labels of the images, and the teacher's logits for them."""

    labels: Tensor | Mixed
    logits: Tensor  # [B, classes]
