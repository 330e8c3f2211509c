"""Faster attention and dropout for CPUs. Figures: BENCHMARKS.md, "the step on CPUs"."""

from dataclasses import dataclass

import torch
from timm.layers import Attention
from torch import Tensor, nn

from models.transforms.attention import QkvLayoutAttention
from models.transforms.base import ModelTransform, change_class


@dataclass(frozen=True)
class CpuKernels(ModelTransform):
    """Replaces attention and dropout; GPUs draw random numbers fast, and their fused attention is fast in every type."""

    in_half: bool
    is_compiled: bool = False  # then torch generates a faster dropout than ours, whose random bits it cannot trace

    def apply(self, model: nn.Module) -> list[str]:
        for module in model.modules():
            # torch's fused attention is slow on CPUs in half precision, and with dropout in any.
            drops = getattr(getattr(module, "attn_drop", None), "p", 0) > 0
            if hasattr(module, "fused_attn") and (self.in_half or drops):
                module.fused_attn_elsewhere, module.fused_attn = module.fused_attn, False
        dropout = {} if self.is_compiled else {nn.Dropout: CpuDropout}
        change_class(model.modules(), {Attention: QkvLayoutAttention} | dropout)
        return []

    def revert(self, model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "fused_attn_elsewhere"):
                module.fused_attn = module.fused_attn_elsewhere
                del module.fused_attn_elsewhere
        change_class(model.modules(), {CpuDropout: nn.Dropout, QkvLayoutAttention: Attention})


class CpuDropout(nn.Dropout):
    """Dropout from 16 random bits an element.

    torch draws a double per element, on one core, which takes a third of a small ViT's step. The probability is rounded
    to a multiple of 1/65536, and the remaining elements are scaled by exactly that.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        count, dropped = input.numel(), min(round(self.p * 2**16), 2**16 - 1)
        words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # None: up to the largest
        bits = words.view(torch.int16)[:count].view(input.shape)
        mask = torch.ge(bits, dropped - 2**15, out=torch.empty_like(input, memory_format=torch.contiguous_format))
        return input * mask.mul_(2**16 / (2**16 - dropped))
