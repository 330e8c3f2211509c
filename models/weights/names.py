"""Converts weight names in Google's, torchvision's and transformers' ViTs to timm's."""

import re

import numpy as np
import torch
from torch import Tensor


def rename(name: str, table: dict[str, str]) -> str:
    for pattern, replacement in table.items():
        name = re.sub(pattern, replacement, name)
    return name


def join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join queries, keys and values into one tensor, as in timm. If one of the three is missing, all are left out."""
    joined = {}
    for name, tensor in state.items():
        if ".attn.query." in name:
            parts = [state.get(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
            if not any(part is None for part in parts):
                joined[name.replace(".query.", ".qkv.")] = torch.cat(parts)
        elif not re.search(r"\.attn\.(key|value)\.", name):
            joined[name] = tensor
    return joined


GOOGLE_VIT = {
    r"^(opt/target|params)/": "",
    r"^cls$": "cls_token",
    r"^(Transformer/posembed_input/)?pos_embedding$": "pos_embed",
    r"^embedding/": "patch_embed.proj/",
    r"^pre_logits/": "pre_logits.fc/",
    r"^Transformer/encoder_norm/": "norm/",
    r"^Transformer/encoderblock_(\d+)/": r"blocks.\1.",
    r"\.LayerNorm_0/": ".norm1/",
    r"\.LayerNorm_[12]/": ".norm2/",
    r"\.MultiHeadDotProductAttention_[01]/": ".attn.",
    r"\.attn\.out/": ".attn.proj/",
    r"\.MlpBlock_[03]/Dense_0/": ".mlp.fc1/",
    r"\.MlpBlock_[03]/Dense_1/": ".mlp.fc2/",
    r"/(kernel|scale)$": ".weight",
    r"/bias$": ".bias",
}


def from_google(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the weights of Google's vision_transformer under timm's names, in torch's layout."""
    names = {name: rename(name, GOOGLE_VIT) for name in arrays}
    return join_qkv({new: torch.from_numpy(_torch_layout(new, arrays[old])) for old, new in names.items()})


def _torch_layout(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array in torch's layout. Google's kernels are [in, out], and attention kernels are split into heads."""
    array = array.astype(np.float32)
    if name.endswith(".attn.proj.weight"):
        array = array.reshape(-1, array.shape[-1])  # [heads, D, out]
    elif re.search(r"\.attn\.(query|key|value)\.", name):
        array = array.reshape(*array.shape[:-2], -1)  # [in, heads, D], bias [heads, D]
    if array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)  # [h, w, in, out]
    return np.ascontiguousarray(array.T if array.ndim == 2 else array)


TORCHVISION = {
    r"^class_token$": "cls_token",
    r"^conv_proj\.": "patch_embed.proj.",
    r"^encoder\.pos_embedding$": "pos_embed",
    r"^encoder\.layers\.encoder_layer_(\d+)\.": r"blocks.\1.",
    r"^encoder\.ln\.": "norm.",
    r"^heads\.head\.": "head.",
    r"^heads\.pre_logits\.": "pre_logits.fc.",
    r"\.ln_([12])\.": r".norm\1.",
    r"\.self_attention\.in_proj_(weight|bias)$": r".attn.qkv.\1",
    r"\.self_attention\.out_proj\.": ".attn.proj.",
    r"\.mlp\.(0|linear_1)\.": ".mlp.fc1.",
    r"\.mlp\.(3|linear_2)\.": ".mlp.fc2.",
}


TRANSFORMERS_KINDS = ("vit", "deit")  # model_type in config.json
TRANSFORMERS = {
    r"^(vit|deit)\.": "",
    r"^embeddings\.cls_token$": "cls_token",
    r"^embeddings\.distillation_token$": "dist_token",
    r"^embeddings\.position_embeddings$": "pos_embed",
    r"^embeddings\.patch_embeddings\.projection\.": "patch_embed.proj.",
    r"^encoder\.layer\.": "blocks.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.attention\.attention\.": ".attn.",
    r"\.attention\.output\.dense\.": ".attn.proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"\.output\.dense\.": ".mlp.fc2.",
    r"^layernorm\.": "norm.",
    r"^distillation_classifier\.": "head_dist.",
    r"^(cls_)?classifier\.": "head.",
}


def by_timms_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a wrapped model, or of a ViT of torchvision or transformers, under timm's names."""
    # The prefixes of DDP and torch.compile come in any order. n_averaged is a counter of torch's AveragedModel.
    plain = {re.sub(r"^((module|_orig_mod)\.)+", "", name): tensor for name, tensor in state.items()}
    state = {name: tensor for name, tensor in plain.items() if name != "n_averaged"}
    if "conv_proj.weight" in state:
        return {rename(name, TORCHVISION): tensor for name, tensor in state.items()}
    if any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in state):
        # Only the original pretraining uses the pooler.
        return join_qkv({rename(name, TRANSFORMERS): each for name, each in state.items() if "pooler." not in name})
    return state
