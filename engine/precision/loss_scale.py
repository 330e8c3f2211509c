"""The loss scale: torch's GradScaler with the update rule of Paddle or of naive float16 trainers."""

import torch
from torch import Tensor
from torch.amp import GradScaler

from configs.schema import Precision
from utils.torch_internals import found_inf, found_infs, scale_and_growth


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
        if settings.HYSTERESIS == "consecutive":  # Paddle: a good update or a shrink resets the count
            self._bad = torch.where(is_bad & ~shrinks, bad_so_far, 0)
        else:  # naive float16: only growth resets it, so every overflow from the Nth on shrinks
            self._bad = torch.where(grows, 0, torch.where(is_bad, bad_so_far, self._bad))
        shrunk = (scale * settings.DECR_RATIO).clamp(min=settings.MIN_LOSS_SCALING)
        grown = scale * settings.INCR_RATIO
        if settings.MAX_LOSS_SCALING is not None:
            grown = grown.clamp(max=settings.MAX_LOSS_SCALING)
        grown = torch.where(torch.isfinite(grown), grown, scale)
        return torch.where(shrinks, shrunk, torch.where(grows, grown, scale))

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """1.0 if unscale_ found a non-finite gradient; valid until update()."""
        return found_inf(self, optimizer)

    def state_dict(self) -> dict:
        return super().state_dict() | {"_bad_tracker": int(self._bad)}

    def load_state_dict(self, state: dict) -> None:
        """Load scale and counters; a checkpoint of torch's own scaler has no count of overflows."""
        super().load_state_dict({name: value for name, value in state.items() if name != "_bad_tracker"})
        self._bad.fill_(state.get("_bad_tracker", 0))
