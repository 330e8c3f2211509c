"""PRECISION.MODE naive: a half-precision copy of the model computes, and the optimizer updates the float32 weights."""

import copy

import torch
from torch import nn

from engine.train.computing import ComputingModel
from models.parts import has_running_statistics
from utils.errors import ConfigError
from utils.torch_internals import foreach_copy_


class HalfCopy(ComputingModel):
    """A half-precision copy, whose gradients are moved to the trained model."""

    def __init__(self, model: nn.Module, half: torch.dtype):
        super().__init__(half_copy(model, half))
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        self._pairs = [(master, copied) for master, copied in pairs if master.requires_grad]

    def gradients_to_master(self) -> None:
        used = [(master, copied) for master, copied in self._pairs if copied.grad is not None]
        for master, _ in used:
            master.grad = torch.empty_like(master)
        if used:
            foreach_copy_([master.grad for master, _ in used], [copied.grad for _, copied in used])
        for _, copied in used:
            copied.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        if self._pairs:
            foreach_copy_([copied for _, copied in self._pairs], [master for master, _ in self._pairs])


def half_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    if any(has_running_statistics(module) for module in model.modules()):
        raise ConfigError(
            "PRECISION.MODE is naive, but the model has BatchNorm, whose running statistics would be inaccurate in "
            "half precision; use PRECISION.MODE autocast"
        )
    return copy.deepcopy(model).to(half)
