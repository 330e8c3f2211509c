"""Activation checkpointing (TRAIN.GRAD_CHECKPOINTING): what blocks compute is not kept for the backward, but computed anew."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from configs.schema import Config
from utils.errors import ConfigError


def recompute_blocks(config: Config, model: nn.Module) -> None:
    """Let each transformer block keep its input alone. A model without such blocks does it as timm's has it.

    Comes after everything that replaces modules.
    """
    if has_blocks(model):
        # Not the last: the backward begins with it, so that all it computed would be there again at once.
        for block in model.blocks[:-1]:
            block.__class__ = _recomputed_class(type(block))
        return
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError, NotImplementedError):  # timm's words for: not in this model
        raise ConfigError(
            f"TRAIN.GRAD_CHECKPOINTING is true, but MODEL.NAME {config.MODEL.NAME} has no transformer blocks (.blocks), and "
            "timm no activation checkpointing for it; set it to false and lower -batch_size with a higher -accum_iter"
        ) from None


def has_blocks(model: nn.Module) -> bool:
    return isinstance(getattr(model, "blocks", None), nn.Sequential | nn.ModuleList)


@functools.cache
def _recomputed_class(cls: type) -> type:
    """The same block. A class of its own, because it goes along with copy.deepcopy, DDP and FSDP2, and hooks on the block
    (which gather its weights, or cast its input) stay outside of what is repeated.
    """

    def forward(self, *args, **kwargs):
        compute = super(recomputed, self).forward
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        return checkpoint(compute, *args, use_reentrant=False, **kwargs)

    # apply_lists, with which a copy of a model is made ready for something else, goes back to `without_lists`.
    plain = getattr(cls, "without_lists", cls)
    recomputed = type(f"{cls.__name__}Recomputed", (cls,), {"forward": forward, "without_lists": plain})
    return recomputed
