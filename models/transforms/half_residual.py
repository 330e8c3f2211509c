"""The residual stream in half precision (PRECISION.RESIDUAL half), which autocast's sums leave in float32."""

from dataclasses import dataclass

import torch
from torch import nn

from models.transforms.base import ModelTransform, blocks_of, wrap


@dataclass(frozen=True)
class HalfResidual(ModelTransform):
    """Casts the input of each block."""

    device_type: str
    half: torch.dtype
    lowers_precision = True

    def apply(self, model: nn.Module) -> list[str]:
        # The last block gets the others' output; another class would exclude it from ClassTokenBlock.
        for block in blocks_of(model, "PRECISION.RESIDUAL is half", "PRECISION.RESIDUAL float32")[:-1]:
            wrap(block, self)
        return []

    def subclass(self, cls: type) -> type:
        device_type, half = self.device_type, self.half

        def forward(self, x, *args, **kwargs):
            # Not without autocast: the model may be run in float32.
            narrows = torch.is_autocast_enabled(device_type)
            return super(narrowed, self).forward(x.to(half) if narrows else x, *args, **kwargs)

        narrowed = type(f"{cls.__name__}HalfResidual", (cls,), {"forward": forward})
        return narrowed
