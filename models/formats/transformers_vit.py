"""The ViT and the distilled DeiT of the transformers library, under timm's names."""

import re

from torch import Tensor

from models.formats.common import join_qkv, rename

KINDS = ("vit", "deit")  # their model_type in config.json
NAMES = {
    r"^(vit|deit)\.": "",
    r"^embeddings\.cls_token$": "cls_token",
    r"^embeddings\.distillation_token$": "dist_token",
    r"^embeddings\.position_embeddings$": "pos_embed",
    r"^embeddings\.patch_embeddings\.projection\.": "patch_embed.proj.",
    r"^encoder\.layer\.(\d+)\.": r"blocks.\1.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.attention\.attention\.": ".attn.",
    r"\.attention\.output\.dense\.": ".attn.proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"^(blocks\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
    r"^layernorm\.": "norm.",
    r"^(cls_)?classifier\.": "head.",
    r"^distillation_classifier\.": "head_dist.",
}


def is_of_transformers(state: dict) -> bool:
    return any(re.fullmatch(r"((vit|deit)\.)?embeddings\.patch_embeddings\.projection\.weight", name) for name in state)


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under timm's names; the pooler, which only its own pretraining reads, is left out."""
    return join_qkv({rename(name, NAMES): tensor for name, tensor in state.items() if "pooler." not in name})
