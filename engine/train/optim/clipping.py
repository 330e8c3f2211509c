"""Clips gradients before an update: by their norm, by value, or each unit's by the norm of its weights (AGC)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from configs.schema import Train

SMALLEST_UNIT = 1e-3  # AGC takes the norm of a unit's weights as at least this, so that one of zeros can learn


class Clipping:
    """TRAIN.CLIP_MODE with TRAIN.GRAD_CLIP; nothing where that is not set."""

    def __init__(self, settings: Train, model: nn.Module, own: dict[str, nn.Parameter] | None = None):
        """`own`: this process's part of each parameter, if they are sharded."""
        limit, own = settings.GRAD_CLIP, dict(model.named_parameters()) if own is None else own
        self.max_norm = limit if settings.CLIP_MODE == "norm" else None
        self.max_value = limit if settings.CLIP_MODE == "value" else None
        self._factor = limit if settings.CLIP_MODE == "agc" else None
        # As timm's --clip-mode agc: all but the weight and bias of the classifier, the last two parameters.
        self._units = list(own.values())[:-2] if self._factor else []

    @property
    def is_by_norm(self) -> bool:
        """Whether the norm of all gradients decides: a fused optimizer then clips while it updates."""
        return not (self.max_value or self._factor)

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Clip the gradients of `parameters`, whose norm is given."""
        if self.max_norm:
            clip_grads_with_norm_(parameters, self.max_norm, norm)
        if self.max_value:
            clip_grad_value_(parameters, self.max_value)
        for each in self._units:
            if each.grad is not None:
                _clip_units(each, self._factor)


def _clip_units(parameter: Tensor, factor: float) -> None:
    """Adaptive gradient clipping (Brock et al., 2021): the norm of a unit's gradient is at most that of its weights x
    `factor`. A unit is a row of a matrix, a filter, or a whole vector.
    """
    dims = tuple(range(1, parameter.ndim)) or None
    largest, norm = (
        torch.linalg.vector_norm(each, dim=dims, keepdim=True) for each in (parameter.detach(), parameter.grad)
    )
    largest = largest.clamp(min=SMALLEST_UNIT) * factor
    scale = largest / norm.clamp(min=1e-6)
    parameter.grad.copy_(torch.where(norm < largest, parameter.grad, parameter.grad * scale))
