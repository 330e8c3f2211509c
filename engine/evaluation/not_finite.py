"""Refuses weights whose outputs are not finite."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from models.transforms import ModelTransforms
from utils.errors import ConfigError
from utils.extras import has_extra


def refuse_not_finite(
    source: str, model: nn.Module, transforms: ModelTransforms, forward: Callable[[], Any]
) -> NoReturn:
    """Raise ConfigError for weights whose outputs are not finite. The doctor adds the place in the model.

    `source`: where the weights are from; `transforms`: those of the model; `forward`: computes such outputs once more.
    """
    where = ""
    if has_extra("doctor"):
        from extras.doctor.trace import first_not_finite

        place = first_not_finite(model, transforms, forward)
        where = f", first of {place}" if place else ""
    raise ConfigError(
        f"{source}: the model's outputs are not finite{where}, so they say nothing; the weights are damaged or from a "
        "training that diverged, or too large for half precision: leave out -amp, or add -amp_dtype bfloat16"
    )
