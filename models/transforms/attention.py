"""timm's attention from queries, keys and values on, and a projection to them that saves a copy in the backward."""

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from utils.torch_internals import sdpa_choice


def attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries [B, heads, n, D / heads], keys and values [B, heads, N, D / heads] -> [B, n, D]"""
    B, _, n, _ = q.shape
    q, k = attention.q_norm(q), attention.k_norm(k)
    # A single query costs little either way. On CUDA the fused kernel for it may be cuDNN's, whose gradients were NaN on
    # an H200: https://github.com/NVIDIA/cudnn-frontend/issues/1072
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
    """The attention weights [B, heads, 1, N] of a single query.

    Logits in float32, as in the fused kernels of the other blocks: they may exceed float16's largest value. They are sums of
    products, because autocast would compute a matmul in half precision whatever the type of its inputs.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) * attention.scale * k).sum(dim=-1)
    return logits.softmax(dim=-1).to(q.dtype)[:, :, None]


class QkvLayoutAttention(Attention):
    """Computes the same numbers. Gradients of queries, keys and values are stacked directly in the layout of the qkv
    layer; timm stacks them and then copies them into that layout.
    """

    def forward(self, x: Tensor, *masks, **named_masks) -> Tensor:
        has_mask = any(mask is not None and mask is not False for mask in (*masks, *named_masks.values()))
        if has_mask or getattr(self, "gate", None) is not None:
            return super().forward(x, *masks, **named_masks)
        B, N, _ = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, self.head_dim)
        return attend(self, *(each.transpose(1, 2) for each in qkv.unbind(2)))


def describe_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Lines for the log: which kernel torch chooses for attention in training; none if the device cannot tell."""
    fused = [each for each in model.modules() if type(each) is QkvLayoutAttention and each.fused_attn]
    lines = []
    for heads, size, dropout in sorted({(each.num_heads, each.head_dim, each.attn_drop.p) for each in fused}):
        try:
            # Two images of 197 tokens: more of either get the same kernel.
            qkv = torch.empty(2, 197, 3, heads, size, device=device, dtype=dtype, requires_grad=True)
            q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
            backend = SDPBackend(sdpa_choice(q, k, v, dropout_p=dropout))
        except RuntimeError:
            return []
        name = backend.name.removesuffix("_ATTENTION").lower()
        lines.append(f"attention: {name} kernel ({heads} heads of {size}, dropout {dropout:g})")
    return lines
