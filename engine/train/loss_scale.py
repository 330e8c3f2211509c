"""The loss scale of half precision: torch's GradScaler with Paddle's rule.

All precisions share it. In float16 it adapts its scale. In bfloat16 and float32 the scale is 1, and it only skips
non-finite updates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import get_total_norm

from configs.schema import Precision as PrecisionSettings
from engine.parallel import Parallel
from engine.train.clipping import Clipping
from utils.torch_internals import found_inf, scale_and_growth


class LossScaler(GradScaler):
    """A loss scale that is constant, or shrinks after several overflows and grows after several good updates.

    It shrinks by PRECISION.DECR_RATIO down to PRECISION.MIN_LOSS_SCALING (PRECISION.DECR_EVERY_N_NAN_OR_INF), and grows
    by PRECISION.INCR_RATIO up to PRECISION.MAX_LOSS_SCALING (PRECISION.INCR_EVERY_N_STEPS).

    torch's own rule neither counts overflows nor has a minimum: after 166 consecutive overflows its scale is exactly 0
    and every gradient is NaN. Everything is computed on the device, without synchronisation.
    """

    def __init__(self, device_type: str, settings: PrecisionSettings, needed: bool):
        """Start with PRECISION.INIT_LOSS_SCALING if `needed` (float16), otherwise with 1.

        The scale stays constant without PRECISION.USE_DYNAMIC_LOSS_SCALING.
        """
        self._settings = settings
        self.moves = needed and settings.USE_DYNAMIC_LOSS_SCALING
        super().__init__(device_type, init_scale=settings.INIT_LOSS_SCALING if needed else 1.0)
        # Overflows since the last good update or decrease of the scale.
        self._bad = torch.zeros((), dtype=torch.int32, device=device_type)

    def update(self) -> None:
        """Adjust the scale after an update was done or skipped, without synchronisation."""
        scale, good = scale_and_growth(self)
        super().update(self._next(scale, good, self.found_inf()) if self.moves else scale.clone())

    @torch.no_grad()
    def _next(self, scale: Tensor, good: Tensor, found_inf: Tensor) -> Tensor:
        """Update the counters and return the new scale."""
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
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], parallel: Parallel, clipping: Clipping
    ) -> Tensor:
        """Unscale, check and clip the gradients before step(). Return their norm before clipping, on the device."""
        self.unscale_(optimizer)
        parallel.sync_found_inf(self.found_inf())
        norm = parallel.norm(local_norm(parameters))
        clipping(parameters, norm)
        return norm

    def found_inf(self) -> Tensor:
        """Return 1.0 if a gradient is not finite, else 0.0, on the device. The value is valid until update()."""
        return found_inf(self)

    def state_dict(self) -> dict:
        return super().state_dict() | {"_bad_tracker": int(self._bad)}

    def load_state_dict(self, state: dict) -> None:
        """Load scale and counters."""
        super().load_state_dict({name: value for name, value in state.items() if name != "_bad_tracker"})
        self._bad.fill_(state["_bad_tracker"])


def local_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of this process's part of the gradient."""
    return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
