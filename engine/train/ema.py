"""The exponential moving average of the weights."""

import copy

import torch

from engine.parallel.replicated import Replicated
from utils.torch_internals import foreach_add_, foreach_mul_, foreach_sub


class Ema:
    """A second model with the moving average of the first one's weights."""

    def __init__(self, model: torch.nn.Module, decay: float):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay

    def follow(self, model: torch.nn.Module, parallel: Replicated) -> None:
        """Let `update` follow this model."""
        pairs = list(zip(parallel.local_state(self.model).values(), parallel.local_state(model).values(), strict=True))
        self._means, self._values = zip(*[pair for pair in pairs if pair[0].is_floating_point()], strict=True)
        self._counts = [pair for pair in pairs if not pair[0].is_floating_point()]  # BatchNorm counts batches

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Move towards the model unless its update was skipped; decided on the device, without synchronisation."""
        differences = foreach_sub(self._values, self._means)
        foreach_mul_(differences, (1 - self._decay) * (1 - skipped.reshape(())))
        foreach_add_(self._means, differences)
        for mine, theirs in self._counts:
            mine.copy_(theirs)
