"""The loss scale: torch's GradScaler, moving by the rule that Paddle and naive float16 trainers follow."""

import torch
from torch import Tensor
from torch.amp import GradScaler

from configs.schema import Precision
from utils.torch_internals import found_inf, found_infs, scale_and_growth


class LossScaler(GradScaler):
    """Shrinks after so many bad updates, grows after so many good ones, within bounds; or stays where it is.

    torch's own rule has no such counting and no floor: after 166 overflows in a row its scale is exactly 0, which makes
    every gradient NaN. The decision falls on the device, and the host never waits for it.
    """

    def __init__(self, device_type: str, settings: Precision, needed: bool):
        """`needed`: the gradients are in float16. Else the scale is 1 and only guards the weights."""
        self._settings = settings
        self.moves = needed and settings.USE_DYNAMIC_LOSS_SCALING
        super().__init__(device_type, init_scale=settings.INIT_LOSS_SCALING if needed else 1.0)
        self._bad = torch.zeros((), dtype=torch.int32, device=device_type)  # bad updates counted so far

    def update(self) -> None:
        """Take in whether the update was skipped, as after torch's update(): all of it stays on the device."""
        scale, good = scale_and_growth(self)
        super().update(self._next(scale, good, sum(found_infs(self))) if self.moves else scale.clone())

    @torch.no_grad()
    def _next(self, scale: Tensor, good: Tensor, found_inf: Tensor) -> Tensor:
        """The scale after this update; the counters move with it."""
        settings = self._settings
        is_bad = found_inf.reshape(()) > 0
        bad_so_far = self._bad + 1
        good_so_far = good + 1
        shrinks = is_bad & (bad_so_far >= settings.DECR_EVERY_N_NAN_OR_INF)
        grows = ~is_bad & (good_so_far >= settings.INCR_EVERY_N_STEPS)
        good.copy_(torch.where(is_bad | grows, 0, good_so_far))
        if settings.HYSTERESIS == "consecutive":  # Paddle: a good update, or a shrink, starts the count anew
            self._bad = torch.where(is_bad & ~shrinks, bad_so_far, 0)
        else:  # naive float16: only growing does, so that from the Nth overflow on each one shrinks
            self._bad = torch.where(grows, 0, torch.where(is_bad, bad_so_far, self._bad))
        shrunk = (scale * settings.DECR_RATIO).clamp(min=settings.MIN_LOSS_SCALING)
        grown = scale * settings.INCR_RATIO
        if settings.MAX_LOSS_SCALING is not None:
            grown = grown.clamp(max=settings.MAX_LOSS_SCALING)
        grown = torch.where(torch.isfinite(grown), grown, scale)
        return torch.where(shrinks, shrunk, torch.where(grows, grown, scale))

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """1.0 where unscale_ met a gradient that is not finite; gone after update()."""
        return found_inf(self, optimizer)

    def state_dict(self) -> dict:
        return super().state_dict() | {"_bad_tracker": int(self._bad)}

    def load_state_dict(self, state: dict) -> None:
        """Take up scale and counters; a checkpoint of torch's own scaler has no count of bad updates."""
        super().load_state_dict({name: value for name, value in state.items() if name != "_bad_tracker"})
        self._bad.fill_(state.get("_bad_tracker", 0))
