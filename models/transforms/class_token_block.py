"""Computes the last block of a Vision Transformer for the class token alone, if the classifier reads only that.

Keys and values are still computed for all tokens. Queries, projection, MLP and last norm of the other tokens do not
influence the logits, so their gradients are zero.
"""

from dataclasses import dataclass

from timm.layers import DropPath, LayerNorm, Mlp
from timm.models.vision_transformer import Attention, Block, LayerScale, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from models.transforms.base import ModelTransform, wrap
from models.transforms.kernels import attend
from utils.torch_internals import add_position_embedding, has_hooks

# All but Attention treat each token by itself. Compared by identity: a subclass may do anything.
KNOWN = {Block, Attention, Mlp, LayerScale, DropPath, LayerNorm}
KNOWN |= {nn.LayerNorm, nn.Linear, nn.Identity, nn.GELU, nn.Dropout}


@dataclass(frozen=True)
class ClassTokenBlock(ModelTransform):
    """Shortens the last block of models in which it consists of known modules; others stay as they are."""

    bypasses_modules = True

    def apply(self, model: nn.Module) -> list[str]:
        if reads_class_token_alone(model):
            wrap(model, self)
        return []

    def subclass(self, cls: type) -> type:
        return ClassTokenVisionTransformer


def reads_class_token_alone(model: nn.Module) -> bool:
    """Whether this is timm's own model with its own last block, and its head reads the class token."""
    if type(model) is not VisionTransformer or model.global_pool != "token" or not len(model.blocks):
        return False
    block = model.blocks[-1]
    modules = [*block.modules(), model.norm]
    if any(type(module) not in KNOWN or "forward" in vars(module) for module in modules):
        return False
    # These three are no longer called as modules, so hooks would miss them.
    passed_by = (block, block.attn, block.attn.qkv)
    return not any(map(has_hooks, passed_by)) and getattr(block.attn, "gate", None) is None


class ClassTokenVisionTransformer(VisionTransformer):
    """`forward` is shorter; `forward_features` and `forward_intermediates` still return all tokens."""

    def forward(self, x: Tensor, *masks, **named_masks) -> Tensor:
        if masks or named_masks or self.grad_checkpointing:
            return super().forward(x, *masks, **named_masks)
        x = self.norm_pre(self.patch_drop(add_position_embedding(self, self.patch_embed(x))))
        *before, last = self.blocks
        for block in before:
            x = block(x)
        return self.forward_head(self.norm(class_token_after(last, x)))


def class_token_after(block: Block, tokens: Tensor) -> Tensor:
    """[B, N, D] -> [B, 1, D]: the first token of what the block returns."""
    x = tokens[:, :1]
    x = x + block.drop_path1(block.ls1(attend_from_first(block.attn, block.norm1(tokens))))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def attend_from_first(attention: Attention, tokens: Tensor) -> Tensor:
    """[B, N, D] -> [B, 1, D]: timm's attention with the queries of the first token only."""
    B, N, _ = tokens.shape
    heads, width = attention.num_heads, attention.num_heads * attention.head_dim
    weight, bias = attention.qkv.weight, attention.qkv.bias  # rows: queries, keys, values
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    q = functional.linear(tokens[:, :1], weight[:width], q_bias).reshape(B, 1, heads, -1).transpose(1, 2)
    kv = functional.linear(tokens, weight[width:], kv_bias).reshape(B, N, 2, heads, -1)
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, N, D / heads]
    return attend(attention, q, k, v)
