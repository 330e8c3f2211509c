"""Faster attention and a shorter last block, with equal results up to rounding; faster dropout on CPUs."""

from dataclasses import dataclass

import torch
from timm.layers import Attention, DropPath, LayerNorm, Mlp
from timm.models.vision_transformer import Block, LayerScale, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from models.transforms.base import ModelTransform, change_class, wrap
from utils.torch_internals import add_position_embedding, has_hooks


def attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention: queries [B, heads, n, D / heads], keys and values [B, heads, N, D / heads] -> [B, n, D]."""
    B, _, n, _ = q.shape
    q, k = attention.q_norm(q), attention.k_norm(k)
    # A single query needs no fused kernel, since it costs little either way. On CUDA the fused kernel may be cuDNN's,
    # whose gradients were NaN on an H200: https://github.com/NVIDIA/cudnn-frontend/issues/1072
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

    Logits are float32, as in the fused kernels of the other blocks, because they may exceed float16's largest value.
    They are computed as sums of products, because autocast would compute a matmul in half precision for any input type.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) * attention.scale * k).sum(dim=-1)
    return logits.softmax(dim=-1).to(q.dtype)[:, :, None]


class QkvLayoutAttention(Attention):
    """timm's attention with one fewer copy in the backward pass.

    Gradients of queries, keys and values are stacked directly in the layout of the qkv layer, while timm stacks them
    and then copies them into that layout. The results are equal.
    """

    def forward(self, x: Tensor, *masks, **named_masks) -> Tensor:
        has_mask = any(mask is not None and mask is not False for mask in (*masks, *named_masks.values()))
        if has_mask or getattr(self, "gate", None) is not None:
            return super().forward(x, *masks, **named_masks)
        B, N, _ = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, self.head_dim)
        return attend(self, *(each.transpose(1, 2) for each in qkv.unbind(2)))


@dataclass(frozen=True)
class CpuKernels(ModelTransform):
    """Faster attention and dropout on CPUs. On GPUs, torch's random numbers and fused attention are fast anyway."""

    in_half: bool
    # If compiled, torch generates a faster dropout than CpuDropout, whose random bits it cannot trace.
    is_compiled: bool = False

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

    torch draws a double per element on one core, which takes a third of a small ViT's step. The probability is rounded
    to a multiple of 1/65536, and the remaining elements are scaled for exactly this probability.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        count, dropped = input.numel(), min(round(self.p * 2**16), 2**16 - 1)
        words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # None means the largest int64
        bits = words.view(torch.int16)[:count].view(input.shape)
        mask = torch.ge(bits, dropped - 2**15, out=torch.empty_like(input, memory_format=torch.contiguous_format))
        return input * mask.mul_(2**16 / (2**16 - dropped))


# --- a shorter last block of a Vision Transformer ---

# If the classifier reads only the class token, the last block computes only that token. Keys and values are still
# computed for all tokens. Queries, projection, MLP and last norm of the other tokens do not influence the logits, so
# their gradients are zero.

# All modules except Attention process each token separately. Classes are compared exactly, since a subclass may differ.
KNOWN = {Block, Attention, Mlp, LayerScale, DropPath, LayerNorm}
KNOWN |= {nn.LayerNorm, nn.Linear, nn.Identity, nn.GELU, nn.Dropout}


@dataclass(frozen=True)
class ClassTokenBlock(ModelTransform):
    """A shorter last block for models whose last block consists of KNOWN modules. Other models stay unchanged."""

    bypasses_modules = True

    def apply(self, model: nn.Module) -> list[str]:
        if reads_only_class_token(model):
            wrap(model, self)
        return []

    def subclass(self, cls: type) -> type:
        return ClassTokenVisionTransformer


def reads_only_class_token(model: nn.Module) -> bool:
    """Return whether this is timm's unmodified VisionTransformer with a head that reads only the class token."""
    if type(model) is not VisionTransformer or model.global_pool != "token" or not len(model.blocks):
        return False
    block = model.blocks[-1]
    modules = [*block.modules(), model.norm]
    if any(type(module) not in KNOWN or "forward" in vars(module) for module in modules):
        return False
    # The shorter block does not call these three modules, so their hooks would not run.
    bypassed = (block, block.attn, block.attn.qkv)
    return not any(map(has_hooks, bypassed)) and getattr(block.attn, "gate", None) is None


class ClassTokenVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with a shorter `forward`. Other methods, such as forward_features, return all tokens."""

    def forward(self, x: Tensor, *masks, **named_masks) -> Tensor:
        if masks or named_masks or self.grad_checkpointing:
            return super().forward(x, *masks, **named_masks)
        x = self.norm_pre(self.patch_drop(add_position_embedding(self, self.patch_embed(x))))
        *before, last = self.blocks
        for block in before:
            x = block(x)
        return self.forward_head(self.norm(class_token_after(last, x)))


def class_token_after(block: Block, tokens: Tensor) -> Tensor:
    """Return the first token of the block's output: [B, N, D] -> [B, 1, D]."""
    x = tokens[:, :1]
    x = x + block.drop_path1(block.ls1(attend_from_first(block.attn, block.norm1(tokens))))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def attend_from_first(attention: Attention, tokens: Tensor) -> Tensor:
    """Compute timm's attention with the query of the first token only: [B, N, D] -> [B, 1, D]."""
    B, N, _ = tokens.shape
    heads, width = attention.num_heads, attention.num_heads * attention.head_dim
    weight, bias = attention.qkv.weight, attention.qkv.bias  # rows: queries, keys, values
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    q = functional.linear(tokens[:, :1], weight[:width], q_bias).reshape(B, 1, heads, -1).transpose(1, 2)
    kv = functional.linear(tokens, weight[width:], kv_bias).reshape(B, N, 2, heads, -1)
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, N, D / heads]
    return attend(attention, q, k, v)
