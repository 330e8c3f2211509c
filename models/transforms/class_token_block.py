"""A shorter last block of a Vision Transformer: it computes only the class token, if the classifier reads nothing else.

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
