"""The model that computes the forward pass: the trained model itself, or in naive mode a half-precision copy of it."""

from torch import nn


class ComputingModel:
    """The trained model itself as the computing model. Its methods do nothing, because there is no copy."""

    def __init__(self, model: nn.Module):
        self.model = model

    def gradients_to_master(self) -> None:
        """Copy the gradients of the computing model, still scaled, to the trained model, if these are two models."""

    def refresh(self) -> None:
        """Copy the trained model's weights to the computing model, if these are two models."""
