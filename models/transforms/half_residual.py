"""The residual stream in half precision (PRECISION.RESIDUAL half), which autocast's sums leave in float32."""

from dataclasses import dataclass

import torch
from torch import nn

from models.transforms.base import ModelTransform, blocks_of, has_blocks, wrap


@dataclass(frozen=True)
class HalfResidual(ModelTransform):
    """Casts the input of each block. `is_required`: refuses models without blocks."""

    device_type: str
    half: torch.dtype
    is_required: bool = True
    lowers_precision = True

    def apply(self, model: nn.Module) -> list[str]:
        if not self.is_required and not has_blocks(model):
            return []
        # The last block gets the others' output; another class would exclude it from ClassTokenBlock.
        for block in blocks_of(model, "PRECISION.RESIDUAL is half", "PRECISION.RESIDUAL float32")[:-1]:
            wrap(block, self)
        name = str(self.half).removeprefix("torch.")
        return [] if self.is_required else [f"residual stream: {name} between blocks (PRECISION.RESIDUAL auto)"]

    def subclass(self, cls: type) -> type:
        device_type, half = self.device_type, self.half

        def forward(self, x, *args, **kwargs):
            # Not without autocast: the model may be run in float32.
            narrows = torch.is_autocast_enabled(device_type)
            return super(narrowed, self).forward(x.to(half) if narrows else x, *args, **kwargs)

        narrowed = type(f"{cls.__name__}HalfResidual", (cls,), {"forward": forward})
        return narrowed
