"""The loss scale: torch's GradScaler with the update rule of Paddle."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import get_total_norm

from configs.schema import Precision
from engine.parallel.replicated import Parallel
from engine.train.optim.clipping import Clipping
from engine.train.optim.factory import AnyOptimizer
from engine.train.optim.skipping import SkippingOptimizer
from utils.torch_internals import found_inf, found_infs, scale_and_growth, set_found_inf


class LossScaler(GradScaler):
    """Shrinks after a number of overflows, grows after a number of good updates, within bounds; or is constant.

    torch's own rule has no such counters and no minimum: after 166 consecutive overflows its scale is exactly 0, and
    every gradient NaN. Everything is computed on the device, without synchronisation.
    """

    def __init__(self, device_type: str, settings: Precision, needed: bool):
        """`needed`: for float16. Otherwise the scale is 1, and only non-finite updates are skipped."""
        self._settings = settings
        self.moves = needed and settings.USE_DYNAMIC_LOSS_SCALING
        super().__init__(device_type, init_scale=settings.INIT_LOSS_SCALING if needed else 1.0)
        self._bad = torch.zeros((), dtype=torch.int32, device=device_type)  # overflows counted so far

    def update(self) -> None:
        """Update the scale after an update was done or skipped, without synchronisation."""
        scale, good = scale_and_growth(self)
        super().update(self._next(scale, good, sum(found_infs(self))) if self.moves else scale.clone())

    @torch.no_grad()
    def _next(self, scale: Tensor, good: Tensor, found_inf: Tensor) -> Tensor:
        """The new scale; updates the counters."""
        settings = self._settings
        is_bad = found_inf.reshape(()) > 0
        bad_so_far = self._bad + 1
        good_so_far = good + 1
        shrinks = is_bad & (bad_so_far >= settings.DECR_EVERY_N_NAN_OR_INF)
        grows = ~is_bad & (good_so_far >= settings.INCR_EVERY_N_STEPS)
        good.copy_(torch.where(is_bad | grows, 0, good_so_far))
        self._bad = torch.where(is_bad & ~shrinks, bad_so_far, 0)  # a good update resets the count, as in Paddle
        shrunk = (scale * settings.DECR_RATIO).clamp(min=settings.MIN_LOSS_SCALING)
        grown = scale * settings.INCR_RATIO
        if settings.MAX_LOSS_SCALING is not None:
            grown = grown.clamp(max=settings.MAX_LOSS_SCALING)
        grown = torch.where(torch.isfinite(grown), grown, scale)
        return torch.where(shrinks, shrunk, torch.where(grows, grown, scale))

    def unscale_and_clip(
        self,
        optimizer: AnyOptimizer,
        parameters: Sequence[Tensor],
        parallel: Parallel,
        clipping: Clipping,
    ) -> Tensor:
        """Prepare step(). Returns the norm of the unscaled gradient before clipping, on the device."""
        self.unscale_(optimizer)
        parallel.sync_found_inf(self.found_inf(optimizer))
        norm = parallel.norm(_local_norm(parameters))
        clipping(parameters, norm)
        return norm

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update the weights, unless a gradient is not finite; decided on the device."""
        if isinstance(optimizer, SkippingOptimizer):
            optimizer.step(self.found_inf(optimizer))
        else:
            super().step(optimizer)

    def found_inf(self, optimizer: AnyOptimizer) -> Tensor:
        """1.0 if a gradient is not finite, else 0.0, on the device; valid until update()."""
        return found_inf(self, optimizer)

    def state_dict(self) -> dict:
        return super().state_dict() | {"_bad_tracker": int(self._bad)}

    def load_state_dict(self, state: dict) -> None:
        """Load scale and counters; a checkpoint of torch's own scaler has no count of overflows."""
        super().load_state_dict({name: value for name, value in state.items() if name != "_bad_tracker"})
        self._bad.fill_(state.get("_bad_tracker", 0))


class FusedLossScaler(LossScaler):
    """Leaves unscaling and clipping to the optimizer's fused kernel, which reads all gradients anyway.

    On GPUs an update spends its time on memory traffic, and the three functions above pass over the gradients one after
    another. Here only the norm does, which also tells whether all gradients are finite. So an update is skipped, too, when
    the squares of finite scaled gradients overflow float32: from a norm of 1.8e19 on.
    """

    def unscale_and_clip(
        self,
        optimizer: AnyOptimizer,
        parameters: Sequence[Tensor],
        parallel: Parallel,
        clipping: Clipping,
    ) -> Tensor:
        if not (optimizer.defaults.get("fused") and clipping.is_by_norm):
            return super().unscale_and_clip(optimizer, parameters, parallel, clipping)
        scale, _ = scale_and_growth(self)
        norm = parallel.norm(_local_norm(parameters)) / scale  # of all processes, so all of them skip alike
        limit = clipping.max_norm
        kept = (limit / (norm + 1e-6)).clamp(max=1) if limit else torch.ones_like(norm)
        set_found_inf(self, optimizer, (~norm.isfinite()).to(scale))
        optimizer.grad_scale = (scale / kept).to(scale)  # the kernel divides by it; step() removes it
        return norm


def _local_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of this process's part of the gradient."""
    return get_total_norm([each.grad for each in parameters if each.grad is not None])
