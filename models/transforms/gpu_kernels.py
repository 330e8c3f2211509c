"""Patch embedding and attention for GPUs: the same numbers up to rounding, and backwards that are faster there."""

from dataclasses import dataclass

import torch
from timm.layers import Attention, PatchEmbed
from torch import Tensor, nn
from torch.nn import functional

from models.transforms.attention import QkvLayoutAttention, describe_kernels
from models.transforms.base import ModelTransform, change_class


@dataclass(frozen=True)
class GpuKernels(ModelTransform):
    """Applied with -compile too: the number of graphs stays, and that of kernels nearly.

    `trains_in`: the type of attention's inputs in training, to log which kernel computes it; None: nothing is logged.
    """

    device: torch.device
    trains_in: torch.dtype | None = None

    def apply(self, model: nn.Module) -> list[str]:
        change_class(model.modules(), {Attention: QkvLayoutAttention})
        embeddings = [module.proj for module in model.modules() if isinstance(module, PatchEmbed)]
        change_class(filter(_cuts_into_patches, embeddings), {nn.Conv2d: PatchConv2d})
        return describe_kernels(model, self.device, self.trains_in) if self.trains_in else []

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
    """A convolution whose kernel is as large as its stride, as a matrix product.

    cuDNN's kernels for the gradient of such a weight are slower than the product that it is.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D, h, w], in memory [B, h, w, D]: the order of tokens, so that timm's flatten copies nothing"""
        height, width = self.kernel_size
        if input.shape[-2] % height or input.shape[-1] % width:  # the convolution leaves the rest out
            return super().forward(input)
        patches = input.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))  # [B, C, h, height, w, width]
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return functional.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
