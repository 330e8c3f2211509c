"""Faster attention, patch embedding and convolutions on GPUs, with equal results up to rounding."""

from dataclasses import dataclass

import torch
from timm.layers import Attention, PatchEmbed
from torch import Tensor, nn
from torch.nn import functional

from models.transforms.base import ModelTransform, change_class, wrap
from models.transforms.kernels import QkvLayoutAttention


@dataclass(frozen=True)
class GpuKernels(ModelTransform):
    """Faster attention and patch embedding on GPUs.

    -compile uses them too: the number of graphs stays the same, and the number of kernels hardly changes.
    """

    def apply(self, model: nn.Module) -> list[str]:
        change_class(model.modules(), {Attention: QkvLayoutAttention})
        embeddings = [module.proj for module in model.modules() if isinstance(module, PatchEmbed)]
        change_class(filter(_cuts_into_patches, embeddings), {nn.Conv2d: PatchConv2d})
        return []

    def revert(self, model: nn.Module) -> None:
        change_class(model.modules(), {QkvLayoutAttention: Attention, PatchConv2d: nn.Conv2d})


def _cuts_into_patches(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size == layer.stride
        and not any(layer.padding)
        and layer.groups == 1
    )


class PatchConv2d(nn.Conv2d):
    """A convolution whose kernel is as large as its stride, computed as a matrix product.

    cuDNN's kernels for the gradient of its weight are slower than this product.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return [B, D, h, w] for [B, C, H, W].

        In memory the result is [B, h, w, D], the order of tokens, so that timm's flatten copies nothing.
        """
        height, width = self.kernel_size
        if input.shape[-2] % height or input.shape[-1] % width:  # the convolution ignores the remaining pixels
            return super().forward(input)
        patches = input.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))  # [B, C, h, height, w, width]
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return functional.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ChannelsLast(ModelTransform):
    """Input images with channels last in memory. Every convolution keeps the layout of its input.

    Weights, gradients and optimizer keep the usual layout, so that checkpoints load everywhere. Rejected: channels last
    for weights too. It would save cuDNN a copy of the weights, which are small compared with the activations, but an
    optimizer state in channels-last layout would be misread, and safetensors refuses such weights.
    """

    def apply(self, model: nn.Module) -> list[str]:
        # The patches of a Vision Transformer do not overlap, so its patch embedding is computed as a matrix product.
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        if not any(each.kernel_size > each.stride for each in convolutions):
            return []
        wrap(model, self)
        # cuDNN times its kernels for each new size and takes the fastest, which may differ from run to run.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        return ["convolutions: channels last in memory"]

    def subclass(self, cls: type) -> type:
        def forward(self, images: Tensor, *others, **named_others):
            return cls.forward(self, images.contiguous(memory_format=torch.channels_last), *others, **named_others)

        return type(f"{cls.__name__}ChannelsLast", (cls,), {"forward": forward})
