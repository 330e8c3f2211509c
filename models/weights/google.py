"""The .npz files of Google's vision_transformer."""

import re
from pathlib import Path

import numpy as np
import torch

from models.weights.state import Weights, join_qkv, rename
from utils.errors import ConfigError

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


def read_google(path: Path) -> Weights:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = {name: rename(name, GOOGLE_VIT) for name in archive.files}
            state = {new: torch.from_numpy(_torch_layout(new, archive[old])) for old, new in names.items()}
        return Weights(join_qkv(state))
    except Exception as error:  # numpy raises what zip, a header or the refused pickle raised
        raise ConfigError(f"{path}: damaged, or not Google's ViT ({type(error).__name__}: {error})") from None


def _torch_layout(name: str, array: np.ndarray) -> np.ndarray:
    """Google's kernels are [in, out], and those of attention are split into heads of width D."""
    array = array.astype(np.float32)
    if name.endswith(".attn.proj.weight"):
        array = array.reshape(-1, array.shape[-1])  # [heads, D, out]
    elif re.search(r"\.attn\.(query|key|value)\.", name):
        array = array.reshape(*array.shape[:-2], -1)  # [in, heads, D], bias [heads, D]
    if array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)  # [h, w, in, out]
    return np.ascontiguousarray(array.T if array.ndim == 2 else array)
