"""The model that computes the updates of a trained model."""

from torch import nn


class ComputingModel:
    """The model that computes the forward and backward passes: the trained model itself.

    In naive mode it is a copy (engine/half_copy.py), whose gradients the optimizer's float32 weights get.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def gradients_to_master(self) -> None:
        """Move the gradients, still scaled, to the trained model."""

    def refresh(self) -> None:
        """Take over the weights of the trained model, after they have changed."""
