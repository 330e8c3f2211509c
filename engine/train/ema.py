"""The exponential moving average of the weights."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from configs.schema import Train
from engine.parallel import Parallel
from utils.errors import ensure
from utils.torch_internals import foreach_add_, foreach_mul_, foreach_sub, without_compiler

WARM_UP = 9  # with the warm-up the average covers about the last ninth of all updates, until the decay is reached


def decay_at(step: int, settings: Train) -> float:
    """The decay of the update after `step` others. The average begins with the weights after the first update, as in timm.

    timm's warm-up, 1 - (1 + step / gamma) ** -power, with gamma 9 and power 1. timm's powers below 1 never reach DeiT's
    0.99996 in the 375,000 updates of 300 epochs; this does in 225,000 (epoch 180), and a run of 18 updates averages its
    last few.
    """
    limit = settings.MODEL_EMA_DECAY
    warmed = step / (step + WARM_UP) if settings.MODEL_EMA_WARMUP else limit
    return min(warmed, limit) if step else 0.0


class ForeachLerp:
    """Moves `means` towards `values` by a fraction of their difference, unless `skipped` is 1. Keeps the numbers of CPUs."""

    def __init__(self, means: Sequence[Tensor], values: Sequence[Tensor]):
        self._means, self._values = means, values

    def __call__(self, fraction: float, skipped: Tensor) -> None:
        differences = foreach_sub(self._values, self._means)
        foreach_mul_(differences, fraction * (1 - skipped))
        foreach_add_(self._means, differences)


class FusedLerp:
    """A move of the average in one pass over memory, by the kernel of fused SGD, which `found_inf` on the device can skip.

    With weight decay 1 and the values as gradients to maximize, it descends along mean - value. Rejected: _foreach_lerp_,
    which takes a scalar weight only from the host.
    """

    def __init__(self, means: Sequence[Tensor], values: Sequence[Tensor]):
        for mean, value in zip(means, values, strict=True):
            # The kernel sees memory, not indices.
            ensure(mean.stride() == value.stride(), "a weight and its moving average differ in their memory layout")
            mean.grad = value
        self._sgd = without_compiler(torch.optim.SGD)(means, weight_decay=1.0, maximize=True, fused=True)

    def __call__(self, fraction: float, skipped: Tensor) -> None:
        self._sgd.param_groups[0]["lr"] = fraction
        self._sgd.found_inf = skipped
        self._sgd.step()


class Ema:
    """A second model with the moving average of the first one's weights."""

    def __init__(self, model: torch.nn.Module, settings: Train, parallel: Parallel | None = None):
        """`parallel`: may copy some of the tensors later, one block after the other."""
        self.model = copy.deepcopy(model, parallel.share_memory(model) if parallel else {}).eval()
        self._settings = settings

    def follow(self, model: torch.nn.Module, parallel: Parallel) -> None:
        """Let `update` follow this model; of frozen weights it holds copies that stay."""
        mine = parallel.local_state(self.model)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        pairs = [(mine[name], theirs) for name, theirs in parallel.local_state(model).items() if name not in frozen]
        means, values = zip(*[pair for pair in pairs if pair[0].is_floating_point()], strict=True)
        lerp = ForeachLerp if means[0].device.type in ("cpu", "mps") else FusedLerp  # MPS: as in optimizers.py
        self._lerp = lerp(means, values)
        self._counts = [pair for pair in pairs if not pair[0].is_floating_point()]  # BatchNorm counts batches

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Move towards the model unless its update, after `step` others, was skipped; decided on the device, without
        synchronisation."""
        self._lerp(1 - decay_at(step, self._settings), skipped.reshape(()))
        for mine, theirs in self._counts:
            mine.copy_(theirs)
