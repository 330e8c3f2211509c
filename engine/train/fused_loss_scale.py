"""The loss scale on devices whose optimizers are fused."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.parallel import Parallel
from engine.train.clipping import Clipping
from engine.train.loss_scale import LossScaler, local_norm
from utils.torch_internals import scale_and_growth, set_found_inf


class FusedLossScaler(LossScaler):
    """A loss scaler that leaves unscaling and clipping to the fused optimizer, which reads all gradients anyway.

    On GPUs an update spends its time on memory traffic, and unscaling, checking and clipping each read all gradients.
    Here only their norm is computed before the optimizer runs. The norm also shows whether all gradients are finite. So
    an update is also skipped if the squares of finite scaled gradients overflow float32 (a norm above 1.8e19).
    """

    def unscale_and_clip(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], parallel: Parallel, clipping: Clipping
    ) -> Tensor:
        if not (optimizer.defaults.get("fused") and clipping.is_by_norm):
            return super().unscale_and_clip(optimizer, parameters, parallel, clipping)
        scale, _ = scale_and_growth(self)
        norm = parallel.norm(local_norm(parameters)) / scale  # over all processes, so that all of them skip together
        limit = clipping.max_norm
        kept = (limit / (norm + 1e-6)).clamp(max=1) if limit else torch.ones_like(norm)
        set_found_inf(self, optimizer, (~norm.isfinite()).to(scale))
        optimizer.grad_scale = (scale / kept).to(scale)  # the kernel divides by grad_scale; step() deletes it
        return norm
