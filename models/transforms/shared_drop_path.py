"""Drop path with its rate as a tensor, so that blocks of different rates share one compiled graph."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.transforms.base import ModelTransform, wrap


@dataclass(frozen=True)
class SharedDropPath(ModelTransform):
    """As timm's DropPath, whose rate is a constant of the graph: 24 blocks of different rates would be 24 graphs, and
    torch.compile gives up after 8.
    """

    def apply(self, model: nn.Module) -> list[str]:
        from timm.layers import DropPath

        # On the model's device: DDP sends buffers by NCCL, and CUDA graphs refuse what is on the host.
        device = next(model.parameters()).device
        for module in model.modules():
            if type(module) is DropPath:
                kept_fraction = torch.full((), 1 - module.drop_prob, device=device)
                module.register_buffer("kept_fraction", kept_fraction, persistent=False)
                wrap(module, self)
        return []

    def subclass(self, cls: type) -> type:
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            is_kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) < self.kept_fraction
            scale = self.kept_fraction if self.scale_by_keep else 1.0
            return x * (is_kept / scale).to(x.dtype)

        return type(f"{cls.__name__}Shared", (cls,), {"forward": forward})
