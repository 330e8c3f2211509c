"""Faster attention, dropout, patch embedding and convolutions, with equal results up to rounding."""

from dataclasses import dataclass

import torch
from timm.layers import Attention, PatchEmbed
from torch import Tensor, nn
from torch.nn import functional

from models.transforms.base import ModelTransform, change_class, wrap


def attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention: queries [B, heads, n, D / heads], keys and values [B, heads, N, D / heads] -> [B, n, D]."""
    B, _, n, _ = q.shape
    q, k = attention.q_norm(q), attention.k_norm(k)
    # A single query needs no fused kernel, since it costs little either way. On CUDA the fused kernel may be cuDNN's, whose
    # gradients were NaN on an H200: https://github.com/NVIDIA/cudnn-frontend/issues/1072
    if n == 1 and q.device.type != "cpu":
        x = attention.attn_drop(_weights_of_one(attention, q, k)) @ v
    elif attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        x = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    else:
        x = attention.attn_drop((q * attention.scale @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
    x = attention.norm(x.transpose(1, 2).reshape(B, n, attention.num_heads * attention.head_dim))
    return attention.proj_drop(attention.proj(x))


def _weights_of_one(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Return the attention weights [B, heads, 1, N] of a single query.

    Logits are float32, as in the fused kernels of the other blocks, because they may exceed float16's largest value. They
    are computed as sums of products, because autocast would compute a matmul in half precision for any input type.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) * attention.scale * k).sum(dim=-1)
    return logits.softmax(dim=-1).to(q.dtype)[:, :, None]


class QkvLayoutAttention(Attention):
    """timm's attention with one copy less in backward.

    Gradients of queries, keys and values are stacked directly in the layout of the qkv layer, while timm stacks them and
    then copies them into that layout. The results are equal.
    """

    def forward(self, x: Tensor, *masks, **named_masks) -> Tensor:
        has_mask = any(mask is not None and mask is not False for mask in (*masks, *named_masks.values()))
        if has_mask or getattr(self, "gate", None) is not None:
            return super().forward(x, *masks, **named_masks)
        B, N, _ = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, self.head_dim)
        return attend(self, *(each.transpose(1, 2) for each in qkv.unbind(2)))


@dataclass(frozen=True)
class GpuKernels(ModelTransform):
    """Faster attention and patch embedding on GPUs.

    They are also used with -compile, where the number of graphs stays the same and the number of kernels nearly so.
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

        In memory it is [B, h, w, D], the order of tokens, so that timm's flatten copies nothing.
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

    Weights, gradients and optimizer keep the usual layout, so that checkpoints load everywhere. Rejected: channels last for
    weights too. cuDNN would then copy no weights, which are small compared with the activations, but an optimizer state of
    the other layout would be misread, and safetensors refuses such weights.
    """

    def apply(self, model: nn.Module) -> list[str]:
        # The patches of a Vision Transformer do not overlap, so its patch embedding is computed as a matrix product.
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        if not any(each.kernel_size > each.stride for each in convolutions):
            return []
        wrap(model, self)
        # cuDNN times its kernels for each new size and takes the fastest, which may differ from start to start.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        return ["convolutions: channels last in memory"]

    def subclass(self, cls: type) -> type:
        def forward(self, images: Tensor, *others, **named_others):
            return cls.forward(self, images.contiguous(memory_format=torch.channels_last), *others, **named_others)

        return type(f"{cls.__name__}ChannelsLast", (cls,), {"forward": forward})


@dataclass(frozen=True)
class CpuKernels(ModelTransform):
    """Faster attention and dropout on CPUs. GPUs do not need them: their random numbers and fused attention are fast."""

    in_half: bool
    is_compiled: bool = (
        False  # torch then generates a faster dropout than CpuDropout, whose random bits it cannot trace
    )

    def apply(self, model: nn.Module) -> list[str]:
        for module in model.modules():
            # On CPUs torch's fused attention is slow in half precision, and with dropout in every precision.
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
    """Dropout from 16 random bits per element.

    torch draws a double per element on one core, which takes a third of a small ViT's step. The probability is rounded to
    a multiple of 1/65536, and the remaining elements are scaled for exactly this probability.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        count, dropped = input.numel(), min(round(self.p * 2**16), 2**16 - 1)
        words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # None means the largest int64
        bits = words.view(torch.int16)[:count].view(input.shape)
        mask = torch.ge(bits, dropped - 2**15, out=torch.empty_like(input, memory_format=torch.contiguous_format))
        return input * mask.mul_(2**16 / (2**16 - dropped))
