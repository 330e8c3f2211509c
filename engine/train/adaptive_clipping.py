"""Adaptive gradient clipping (TRAIN.CLIP_MODE agc; Brock et al., 2021)."""

from collections.abc import Sequence

import torch
from torch import nn

SMALLEST_UNIT = 1e-3  # the lower limit for the norm of a unit's weights, so that a unit can learn even if all are 0


def clip_adaptively(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Limit the norm of each unit's gradient to `factor` times the norm of the unit's weights.

    A unit is a row of a matrix, a filter, or a whole vector.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            _clip_units(parameter, factor)


def _clip_units(parameter: nn.Parameter, factor: float) -> None:
    dims = tuple(range(1, parameter.ndim)) or None
    weights = torch.linalg.vector_norm(parameter.detach(), dim=dims, keepdim=True)
    norm = torch.linalg.vector_norm(parameter.grad, dim=dims, keepdim=True)
    largest = weights.clamp(min=SMALLEST_UNIT) * factor
    scale = largest / norm.clamp(min=1e-6)
    parameter.grad.copy_(torch.where(norm < largest, parameter.grad, parameter.grad * scale))
