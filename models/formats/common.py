"""Shared by the readers: finding the weights in a checkpoint, renaming, refusing files that could run code."""

import re
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from utils.errors import ConfigError


class Weights(NamedTuple):
    """The weights in a file, under timm's names."""

    state: dict[str, Tensor]
    key: str = ""  # under which they were found; '' where the file has nothing but weights
    record: dict = {}  # what a checkpoint of ours says beside its weights: those of RECORD


# Plain values of our checkpoints, and of the files that scripts/export.py makes of them; other programs may have others.
RECORD = {
    "arch": str,
    "class_names": list,
    "split": dict,
    "validation": dict,
    "config": dict,
    "data": dict,
    "weights": str,
    "args": dict,  # the command line of timm's and torchvision's training scripts
}


def record_of(content: dict) -> dict:
    plain = {name: vars(value) if isinstance(value, Namespace) else value for name, value in content.items()}
    record = {name: plain[name] for name, kind in RECORD.items() if isinstance(plain.get(name), kind)}
    if not all(isinstance(name, str) for name in record.get("class_names", ())):
        del record["class_names"]
    return record


# A checkpoint's weights, best first: timm, PaddleViT and torchvision evaluate and fine-tune the running mean too.
WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")
PREFERRED = "preferred"  # in our checkpoints: the key of the weights that scored better


def weights_of(content, path: Path) -> tuple[dict, str]:
    """The dict with the weights in a training checkpoint, and its key; '' where the file has nothing but weights."""
    if isinstance(content, dict):
        keys = [
            key for key in (content.get(PREFERRED), *WEIGHT_KEYS) if isinstance(content.get(key), dict) and content[key]
        ]
        weights, key = (content[keys[0]], keys[0]) if keys else (content, "")
        if all(isinstance(name, str) for name in weights):
            return dict(weights), key
    raise ConfigError(f"{path}: no weights found; looked for a dict of tensors, or one under {', '.join(WEIGHT_KEYS)}")


def rename(name: str, table: dict[str, str]) -> str:
    for pattern, replacement in table.items():
        name = re.sub(pattern, replacement, name)
    return name


def join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values become one tensor, as in timm; where one is missing, the model will say so."""
    joined = {}
    for name, tensor in state.items():
        if ".attn.query." in name:
            parts = [state.get(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
            if not any(part is None for part in parts):
                joined[name.replace(".query.", ".qkv.")] = torch.cat(parts)
        elif not re.search(r"\.attn\.(key|value)\.", name):
            joined[name] = tensor
    return joined


def refusal(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: refused, because it holds more than weights ({what}) and reading that could run code. Where you trust "
        "the file, load it with the program that made it and save only the weights, as .safetensors"
    )
