"""The model that computes the forward pass: the trained model itself, or in naive mode a half-precision copy of it."""

import copy

import torch
from torch import nn

from models.parts import has_running_statistics
from utils.errors import ConfigError
from utils.torch_internals import foreach_copy_


class ComputingModel:
    """The trained model itself as the computing model. A subclass that computes with a copy overrides the methods."""

    def __init__(self, model: nn.Module):
        self.model = model

    def gradients_to_master(self) -> None:
        """Copy the gradients, still scaled, from the computing model to the trained model. Here they are one model."""

    def refresh(self) -> None:
        """Copy the weights from the trained model to the computing model. Here they are one model."""


class HalfCopy(ComputingModel):
    """A half-precision copy of the trained model that computes the forward and backward passes.

    The optimizer updates the trained model's float32 weights with the gradients of this copy.
    """

    def __init__(self, model: nn.Module, half: torch.dtype):
        super().__init__(half_copy(model, half))
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        self._masters, self._halves = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)

    def gradients_to_master(self) -> None:
        used = [pair for pair in zip(self._masters, self._halves, strict=True) if pair[1].grad is not None]
        for master, _ in used:
            master.grad = torch.empty_like(master)
        if used:
            foreach_copy_([master.grad for master, _ in used], [half.grad for _, half in used])
        for _, half in used:
            half.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        foreach_copy_(self._halves, self._masters)


def half_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    if any(has_running_statistics(module) for module in model.modules()):
        raise ConfigError(
            "PRECISION.MODE is naive, but the model has BatchNorm, whose running statistics would be inaccurate in "
            "half precision; use PRECISION.MODE autocast"
        )
    return copy.deepcopy(model).to(half)
