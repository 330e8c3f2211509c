"""Builds the training loss from the settings."""

from collections.abc import Callable, Sequence

from torch import Tensor

from configs.schema import Config
from datasets import Mixed
from engine.loss.classification import BinaryCrossEntropy, CrossEntropy

Loss = Callable[[Tensor, Tensor | Mixed], Tensor]  # (logits [B, classes], targets) -> mean over the images


def build_loss(config: Config, class_weights: Sequence[float] | None = None) -> Loss:
    """`class_weights`: see datasets.balance; None: no class counts more than another."""
    kinds = {"cross_entropy": CrossEntropy, "bce": BinaryCrossEntropy}
    return kinds[config.TRAIN.LOSS](config.TRAIN, class_weights)
