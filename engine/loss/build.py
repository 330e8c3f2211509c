"""Builds the training loss from the settings."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.schema import Config
from datasets import Mixed
from engine.loss.classification import BinaryCrossEntropy, CrossEntropy

Loss = Callable[[Tensor, Tensor | Mixed], Tensor]  # (logits [B, classes], targets) -> mean over the images


def build_loss(
    config: Config, class_weights: Sequence[float] | None = None, device: torch.device | None = None
) -> Loss:
    """`class_weights`: see datasets.balance; None: no class counts more than another. `device`: that of the logits."""
    kinds = {"cross_entropy": CrossEntropy, "bce": BinaryCrossEntropy}
    weights = None if class_weights is None else torch.tensor(class_weights).to(device)
    return kinds[config.TRAIN.LOSS](config.TRAIN, weights)
