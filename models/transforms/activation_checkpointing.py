"""Activation checkpointing (TRAIN.GRAD_CHECKPOINTING): blocks are recomputed in the backward to save memory."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.transforms.base import ModelTransform, has_blocks, unwrap, wrap
from utils.errors import ConfigError


@dataclass(frozen=True)
class ActivationCheckpointing(ModelTransform):
    """Each transformer block saves only its input. Models without such blocks use timm's checkpointing."""

    model_name: str

    def apply(self, model: nn.Module) -> list[str]:
        if has_blocks(model):
            # Not the last one: the backward begins with it, so recomputing it saves nothing.
            for block in model.blocks[:-1]:
                wrap(block, self)
            return []
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError, NotImplementedError):  # timm: not supported by this model
            raise ConfigError(
                f"TRAIN.GRAD_CHECKPOINTING is true, but MODEL.NAME {self.model_name} has no transformer blocks (.blocks), "
                "and timm no activation checkpointing for it; set it to false and lower -batch_size with a higher "
                "-accum_iter"
            ) from None
        return []

    def revert(self, model: nn.Module) -> None:
        unwrap(model, self)
        if not has_blocks(model):
            model.set_grad_checkpointing(False)

    def subclass(self, cls: type) -> type:
        """Hooks on the block, such as FSDP's, stay outside of what is recomputed."""

        def forward(self, *args, **kwargs):
            compute = super(recomputed, self).forward
            if not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            return checkpoint(compute, *args, use_reentrant=False, **kwargs)

        recomputed = type(f"{cls.__name__}Recomputed", (cls,), {"forward": forward})
        return recomputed
