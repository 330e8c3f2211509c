"""The model that computes the forward pass: the trained model itself, or in naive mode a half-precision copy of it."""

import copy

import torch
from torch import nn

from models.parts import has_running_statistics
from utils.errors import ConfigError
from utils.torch_internals import foreach_copy_


class ComputingModel:
    """The trained model itself, or in naive mode a half-precision copy, which computes the forward and backward passes.

    The optimizer updates the trained model's float32 weights with the gradients of the copy.
    """

    def __init__(self, model: nn.Module, half: torch.dtype | None = None):
        """Copy the model in the type `half`. None: `model` itself computes, so there is nothing to copy."""
        self.model = model if half is None else half_copy(model, half)
        pairs = [] if half is None else zip(model.parameters(), self.model.parameters(), strict=True)
        self._pairs = [(master, copied) for master, copied in pairs if master.requires_grad]

    def gradients_to_master(self) -> None:
        """Move the gradients, still scaled, from the copy to the trained model."""
        used = [(master, copied) for master, copied in self._pairs if copied.grad is not None]
        for master, _ in used:
            master.grad = torch.empty_like(master)
        if used:
            foreach_copy_([master.grad for master, _ in used], [copied.grad for _, copied in used])
        for _, copied in used:
            copied.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights from the trained model to the copy."""
        if self._pairs:
            foreach_copy_([copied for _, copied in self._pairs], [master for master, _ in self._pairs])


def half_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    if any(has_running_statistics(module) for module in model.modules()):
        raise ConfigError(
            "PRECISION.MODE is naive, but the model has BatchNorm, whose running statistics would be inaccurate in "
            "half precision; use PRECISION.MODE autocast"
        )
    return copy.deepcopy(model).to(half)
