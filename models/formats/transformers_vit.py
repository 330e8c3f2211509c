"""The ViT and the distilled DeiT of the transformers library, under timm's names, and the other way round."""

import re
from collections.abc import Iterator

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


def from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of ViTForImageClassification, or DeiTForImageClassificationWithTeacher where there is a distillation
    token, as their published files have them. Newer versions rename them when they load."""
    apart = {}
    for name, tensor in state.items():
        parts = tensor.chunk(3) if ".attn.qkv." in name else [tensor]
        words = ("query", "key", "value") if ".attn.qkv." in name else ("",)
        apart |= {name.replace(".qkv.", f".{word}."): part for word, part in zip(words, parts, strict=True)}
    depth = sum(name.endswith(".norm1.weight") for name in state)
    theirs = {name: rename(name, NAMES) for name in _names(depth, "dist_token" in state)}
    return {name: apart[timm].clone() for name, timm in theirs.items() if timm in apart}


def _names(depth: int, is_distilled: bool) -> Iterator[str]:
    kind = KINDS[is_distilled]
    for name in ("cls_token", "distillation_token", "position_embeddings"):
        yield f"{kind}.embeddings.{name}"
    attention = [f"attention.attention.{part}" for part in ("query", "key", "value")]
    inner = [
        "layernorm_before",
        *attention,
        "attention.output.dense",
        "layernorm_after",
        "intermediate.dense",
        "output.dense",
    ]
    modules = [f"{kind}.encoder.layer.{number}.{name}" for number in range(depth) for name in inner]
    heads = ["cls_classifier", "distillation_classifier"] if is_distilled else ["classifier"]
    for module in (f"{kind}.embeddings.patch_embeddings.projection", *modules, f"{kind}.layernorm", *heads):
        yield from (f"{module}.weight", f"{module}.bias")
