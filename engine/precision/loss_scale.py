"""Unscaling, checking and clipping of gradients, and the loss scale: torch's GradScaler with Paddle's rule."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from configs.schema import Precision, Train
from engine.parallel import Parallel
from utils.torch_internals import found_inf, scale_and_growth, set_found_inf

SMALLEST_UNIT = 1e-3  # AGC's lower limit for the norm of a unit's weights, so that a unit can learn even if all are 0


class Clipping:
    """Gradient clipping by TRAIN.CLIP_MODE and TRAIN.GRAD_CLIP. It does nothing if GRAD_CLIP is not set."""

    def __init__(self, settings: Train, parameters: Iterable[nn.Parameter]):
        """Set the limit, and the parameters that AGC clips. `parameters`: all, or this process's shards of all."""
        limit = settings.GRAD_CLIP
        self.max_norm = limit if settings.CLIP_MODE == "norm" else None
        self.max_value = limit if settings.CLIP_MODE == "value" else None
        self._factor = limit if settings.CLIP_MODE == "agc" else None
        # As in timm's --clip-mode agc, the last two parameters are left out: weight and bias of the classifier.
        self._units = list(parameters)[:-2] if self._factor else []

    @property
    def is_by_norm(self) -> bool:
        """Return whether clipping needs only the norm of all gradients, so that a fused optimizer can clip."""
        return not (self.max_value or self._factor)

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Clip the gradients of `parameters`. `norm` is the norm of all gradients together."""
        if self.max_norm:
            clip_grads_with_norm_(parameters, self.max_norm, norm)
        if self.max_value:
            clip_grad_value_(parameters, self.max_value)
        for each in self._units:
            if each.grad is not None:
                _clip_units(each, self._factor)


def _clip_units(parameter: Tensor, factor: float) -> None:
    """Clip a gradient adaptively (AGC, Brock et al., 2021).

    AGC limits the norm of each unit's gradient to `factor` times the norm of the unit's weights. A unit is a row of a
    matrix, a filter, or a whole vector.
    """
    dims = tuple(range(1, parameter.ndim)) or None
    both = parameter.detach(), parameter.grad
    largest, norm = (torch.linalg.vector_norm(each, dim=dims, keepdim=True) for each in both)
    largest = largest.clamp(min=SMALLEST_UNIT) * factor
    scale = largest / norm.clamp(min=1e-6)
    parameter.grad.copy_(torch.where(norm < largest, parameter.grad, parameter.grad * scale))


class LossScaler(GradScaler):
    """A loss scale that is constant, or shrinks after several overflows and grows after several good updates.

    torch's own rule neither counts overflows nor has a minimum: after 166 consecutive overflows its scale is exactly 0
    and every gradient is NaN. Everything is computed on the device, without synchronisation.
    """

    def __init__(self, device_type: str, settings: Precision, needed: bool):
        """Start with the initial scale. `needed` is true for float16. For other types the scale stays 1, and the scaler
        only skips non-finite updates.
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
        norm = parallel.norm(_local_norm(parameters))
        clipping(parameters, norm)
        return norm

    def found_inf(self) -> Tensor:
        """Return 1.0 if a gradient is not finite, else 0.0, on the device. The value is valid until update()."""
        return found_inf(self)

    def state_dict(self) -> dict:
        return super().state_dict() | {"_bad_tracker": int(self._bad)}

    def load_state_dict(self, state: dict) -> None:
        """Load scale and counters. A state of torch's own scaler has no count of overflows."""
        super().load_state_dict({name: value for name, value in state.items() if name != "_bad_tracker"})
        self._bad.fill_(state.get("_bad_tracker", 0))


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
        norm = parallel.norm(_local_norm(parameters)) / scale  # over all processes, so that all of them skip together
        limit = clipping.max_norm
        kept = (limit / (norm + 1e-6)).clamp(max=1) if limit else torch.ones_like(norm)
        set_found_inf(self, optimizer, (~norm.isfinite()).to(scale))
        optimizer.grad_scale = (scale / kept).to(scale)  # the kernel divides by grad_scale; step() deletes it
        return norm


def _local_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of this process's part of the gradient."""
    return get_total_norm([each.grad for each in parameters if each.grad is not None])
