"""Transforms for blocks: checkpointing, half-precision inputs, one graph for DropPath, resized position embeddings."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from models.transforms.base import ModelTransform, blocks_of, has_blocks, unwrap, wrap
from utils.errors import ConfigError


@dataclass(frozen=True)
class ActivationCheckpointing(ModelTransform):
    """Activation checkpointing: each block saves only its input. Models without blocks use timm's implementation."""

    model_name: str

    def apply(self, model: nn.Module) -> list[str]:
        if has_blocks(model):
            # The last block is left out: backward starts with it, so recomputing it saves no memory.
            for block in model.blocks[:-1]:
                wrap(block, self)
            return []
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError, NotImplementedError):  # timm's errors for unsupported models
            raise ConfigError(
                f"TRAIN.GRAD_CHECKPOINTING is true, but timm has no activation checkpointing for MODEL.NAME "
                f"{self.model_name}; set it to false, lower -batch_size and raise -accum_iter"
            ) from None
        return []

    def revert(self, model: nn.Module) -> None:
        unwrap(model, self)
        if not has_blocks(model):
            model.set_grad_checkpointing(False)

    def subclass(self, cls: type) -> type:
        """Return a subclass that recomputes its forward, but not the hooks on the block, such as FSDP's."""

        def forward(self, *args, **kwargs):
            compute = super(recomputed, self).forward
            if not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            return checkpoint(compute, *args, use_reentrant=False, **kwargs)

        recomputed = type(f"{cls.__name__}Recomputed", (cls,), {"forward": forward})
        return recomputed


@dataclass(frozen=True)
class HalfResidual(ModelTransform):
    """A residual stream in half precision between blocks. With `is_required`, models without blocks are refused."""

    device_type: str
    half: torch.dtype
    is_required: bool

    def apply(self, model: nn.Module) -> list[str]:
        if not self.is_required and not has_blocks(model):
            return []
        # The last block is left out: its input has the half type anyway, and ClassTokenBlock needs its original class.
        for block in blocks_of(model, "PRECISION.RESIDUAL is half", "PRECISION.RESIDUAL float32")[:-1]:
            wrap(block, self)
        name = str(self.half).removeprefix("torch.")
        return [] if self.is_required else [f"residual stream: {name} between blocks (PRECISION.RESIDUAL auto)"]

    def subclass(self, cls: type) -> type:
        device_type, half = self.device_type, self.half

        def forward(self, x, *args, **kwargs):
            # Cast only under autocast, because the model may also run in float32.
            narrows = torch.is_autocast_enabled(device_type)
            return super(narrowed, self).forward(x.to(half) if narrows else x, *args, **kwargs)

        narrowed = type(f"{cls.__name__}HalfResidual", (cls,), {"forward": forward})
        return narrowed


@dataclass(frozen=True)
class SharedDropPath(ModelTransform):
    """A DropPath whose rate is a tensor, so that all blocks share one graph.

    If the rate were a constant, 24 blocks of different rates would need 24 graphs, and torch.compile gives up after 8.
    """

    def apply(self, model: nn.Module) -> list[str]:
        from timm.layers import DropPath

        # The rate is on the model's device, because DDP sends buffers by NCCL and CUDA graphs refuse host tensors.
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


@dataclass(frozen=True)
class ResizeByMatrices(ModelTransform):
    """Resizing of position embeddings by matrix products. torch's resizing has no deterministic gradient on GPUs."""

    def apply(self, model: nn.Module) -> list[str]:
        wrap(model, self)
        return []

    def subclass(self, cls: type) -> type:
        def forward(self, *args, **kwargs):
            with ByMatrices():
                return cls.forward(self, *args, **kwargs)

        return type(f"{cls.__name__}ByMatrices", (cls,), {"forward": forward})


class ByMatrices(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (resized if function is functional.interpolate else function)(*args, **(kwargs or {}))


def resized(images: Tensor, size: tuple[int, int] | int, **how) -> Tensor:
    """Resize [B, C, H, W] to [B, C, *size] like functional.interpolate, but by matrix products for rows and columns.

    [B, C, L], a factorized position embedding, is resized to [B, C, size].
    """
    with torch.autocast(images.device.type, enabled=False):
        if images.ndim == 3:
            identity = torch.eye(images.shape[2], device=images.device, dtype=images.dtype)
            return images @ functional.interpolate(identity[None], size, **how)[0]
        of_rows, of_columns = (
            functional.interpolate(
                torch.eye(before, device=images.device, dtype=images.dtype)[None, None], (after, before), **how
            )[0, 0]
            for before, after in zip(images.shape[2:], size, strict=True)
        )
        return of_rows @ images @ of_columns.T
