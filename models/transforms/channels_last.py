"""Convolutions over images whose channels lie together in memory, for which GPUs have the faster kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.transforms.base import ModelTransform, wrap


@dataclass(frozen=True)
class ChannelsLast(ModelTransform):
    """Hands the images on with channels last; every convolution keeps the layout of its input.

    Weights, gradients and optimizer keep the usual layout, so that checkpoints load everywhere. Rejected: weights with
    channels last, too. cuDNN then copies no weights, which are small beside the activations, but an optimizer's state
    of the other layout would be misread, and safetensors refuses them.
    """

    def apply(self, model: nn.Module) -> list[str]:
        if not has_overlapping_convolutions(model):
            return []
        wrap(model, self)
        # Try cuDNN's kernels for each new size, and take the fastest: not the same one at every start.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        return ["convolutions: channels last in memory"]

    def subclass(self, cls: type) -> type:
        def forward(self, images: Tensor, *others, **named_others):
            return cls.forward(self, images.contiguous(memory_format=torch.channels_last), *others, **named_others)

        return type(f"{cls.__name__}ChannelsLast", (cls,), {"forward": forward})


def has_overlapping_convolutions(model: nn.Module) -> bool:
    """A Vision Transformer's patch embedding does not overlap, and is a matrix product."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return any(each.kernel_size > each.stride for each in convolutions)
