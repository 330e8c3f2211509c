"""The exponential moving average of the weights."""

import copy

import torch

from configs.schema import Train
from engine.parallel.replicated import Replicated
from utils.torch_internals import foreach_add_, foreach_mul_, foreach_sub

WARM_UP = 9  # with the warm-up the average covers about the last ninth of all updates, until the decay is reached


def decay_at(step: int, settings: Train) -> float:
    """The decay of the update after `step` others.

    timm's warm-up, 1 - (1 + step / gamma) ** -power, with gamma 9 and power 1. timm's powers below 1 never reach DeiT's
    0.99996 in the 375,000 updates of 300 epochs; this does in 225,000 (epoch 180), and a run of 18 updates averages its
    last few.
    """
    limit = settings.MODEL_EMA_DECAY
    return min(step / (step + WARM_UP), limit) if settings.MODEL_EMA_WARMUP else limit


class Ema:
    """A second model with the moving average of the first one's weights."""

    def __init__(self, model: torch.nn.Module, settings: Train):
        self.model = copy.deepcopy(model).eval()
        self._settings = settings

    def follow(self, model: torch.nn.Module, parallel: Replicated) -> None:
        """Let `update` follow this model."""
        pairs = list(zip(parallel.local_state(self.model).values(), parallel.local_state(model).values(), strict=True))
        self._means, self._values = zip(*[pair for pair in pairs if pair[0].is_floating_point()], strict=True)
        self._counts = [pair for pair in pairs if not pair[0].is_floating_point()]  # BatchNorm counts batches

    @torch.no_grad()
    def update(self, step: int, skipped: torch.Tensor) -> None:
        """Move towards the model unless its update, after `step` others, was skipped; decided on the device, without
        synchronisation."""
        differences = foreach_sub(self._values, self._means)
        foreach_mul_(differences, (1 - decay_at(step, self._settings)) * (1 - skipped.reshape(())))
        foreach_add_(self._means, differences)
        for mine, theirs in self._counts:
            mine.copy_(theirs)
