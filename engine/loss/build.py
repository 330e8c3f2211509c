"""Builds the training loss from the settings."""

from collections.abc import Callable

from torch import Tensor

from configs.schema import Config
from datasets import Mixed
from engine.loss.classification import ClassificationLoss

Loss = Callable[[Tensor, Tensor | Mixed], Tensor]  # (logits [B, classes], targets) -> mean over the images


def build_loss(config: Config) -> Loss:
    return ClassificationLoss(config.TRAIN)
