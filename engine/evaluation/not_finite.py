"""Refuses weights with which the model's outputs are not finite."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from models.transforms import ModelTransforms
from utils.errors import ConfigError


def refuse_not_finite(
    source: str, model: nn.Module, transforms: ModelTransforms, forward: Callable[[], Any]
) -> NoReturn:
    """Raise ConfigError for weights whose outputs are not finite. The message names the place in the model.

    `source` names the weights, `transforms` are the model's transforms, and `forward` computes the outputs again.
    """
    from extras.doctor.trace import first_not_finite

    place = first_not_finite(model, transforms, forward)
    where = f", first in {place}" if place else ""
    raise ConfigError(
        f"{source}: the model's outputs are not finite{where}; the weights are damaged, from a run that diverged, or "
        "too large for half precision: leave out -amp, or add -amp_dtype bfloat16"
    )
