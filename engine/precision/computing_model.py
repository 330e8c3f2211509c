"""The model that computes the forward pass: the trained model itself, or in naive mode a half-precision copy of it."""

from torch import nn


class ComputingModel:
    """The trained model itself as the computing model. A subclass that computes with a copy overrides the methods."""

    def __init__(self, model: nn.Module):
        self.model = model

    def gradients_to_master(self) -> None:
        """Copy the gradients, still scaled, from the computing model to the trained model. Here they are one model."""

    def refresh(self) -> None:
        """Copy the weights from the trained model to the computing model. Here they are one model."""
