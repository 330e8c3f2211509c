"""The exponential moving average of the weights."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.schema import Train
from engine.parallel import Parallel
from utils.errors import ensure
from utils.torch_internals import foreach_add_, foreach_mul_, foreach_sub, without_compiler

# With warm-up, the average covers about the last ninth of the updates so far, until MODEL_EMA_DECAY limits the decay.
WARM_UP = 9
# Moves averages by a fraction of the difference to their weights, unless `skipped` (1 or 0, on the device) is 1.
Lerp = Callable[[float, Tensor], None]


def decay_at(step: int, settings: Train) -> float:
    """Return the decay for update `step`. For update 0 it is 0: the average starts as the updated weights, as in timm.

    A warm-up is 1 - (1 + step / gamma) ** -power. By default, gamma is 9 and power 1: the decay reaches DeiT's 0.99996
    after 225,000 of the 375,000 updates of 300 epochs, and in a run of 18 updates the average covers the last few. In
    timm's train.py, gamma is 1 and power 2/3: the decay never reaches 0.99996 in such a run.
    """
    limit = settings.MODEL_EMA_DECAY
    warmed = {True: step / (step + WARM_UP), "timm": 1 - (1 + step) ** (-2 / 3), False: limit}
    return min(warmed[settings.MODEL_EMA_WARMUP], limit) if step else 0.0


def foreach_lerp(means: Sequence[Tensor], values: Sequence[Tensor]) -> Lerp:
    """Return a function that moves `means` towards `values`.

    The results of CPU runs depend on the rounding here, so this arithmetic must not change.
    """

    def move(fraction: float, skipped: Tensor) -> None:
        differences = foreach_sub(values, means)
        foreach_mul_(differences, fraction * (1 - skipped))
        foreach_add_(means, differences)

    return move


def fused_lerp(means: Sequence[Tensor], values: Sequence[Tensor]) -> Lerp:
    """Return such a function that makes one pass over memory, with the kernel of fused SGD, which can skip a step.

    With weight decay 1, and the values as gradients to maximize, SGD subtracts a fraction of mean - value. Rejected:
    _foreach_lerp_, which takes a scalar weight only from the host.
    """
    for mean, value in zip(means, values, strict=True):
        # The kernel reads memory in order and ignores strides.
        ensure(mean.stride() == value.stride(), "a weight and its moving average differ in their memory layout")
        mean.grad = value
    sgd = without_compiler(torch.optim.SGD)(means, weight_decay=1.0, maximize=True, fused=True)

    def move(fraction: float, skipped: Tensor) -> None:
        sgd.param_groups[0]["lr"] = fraction
        sgd.found_inf = skipped
        sgd.step()

    return move


class Ema:
    """A copy of the model whose weights are the moving average of the model's weights."""

    def __init__(self, model: torch.nn.Module, settings: Train, parallel: Parallel):
        """Copy the model. If the model is sharded, `parallel.place` copies the tensors of its blocks later."""
        self.model = copy.deepcopy(model, parallel.share_memory(model)).eval()
        self._settings = settings

    def follow(self, model: torch.nn.Module, parallel: Parallel) -> None:
        """Choose the weights that `update` averages. Frozen weights are copied only once."""
        average = parallel.local_state(self.model)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        pairs = [(average[name], tensor) for name, tensor in parallel.local_state(model).items() if name not in frozen]
        means, values = zip(*[pair for pair in pairs if pair[0].is_floating_point()], strict=True)
        # On MPS the fused kernels of older torch versions ignore found_inf, see optimizers.py.
        lerp = foreach_lerp if means[0].device.type in ("cpu", "mps") else fused_lerp
        self._lerp = lerp(means, values)
        self._counts = [pair for pair in pairs if not pair[0].is_floating_point()]  # BatchNorm's batch counters

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Add the weights after update `step` to the average. `skipped` is 1 or 0, on the device."""
        self._lerp(1 - decay_at(step, self._settings), skipped.reshape(()))
        for average, value in self._counts:
            average.copy_(value)
