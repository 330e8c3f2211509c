"""torchvision: a state dict under its names, with a JSON beside it that says which model it is of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from models.export.plain_vit import EPS, arguments, plain_vit
from models.export.subject import Subject
from models.weights.metadata import TORCHVISION_NAMES
from models.weights.names import timm_names_of_torchvision as timm_names
from utils.errors import ConfigError

SUFFIX = ".pth"
LOADED_BY = "torchvision's own model"
OTHERS = {timm: theirs for theirs, timm in TORCHVISION_NAMES.items()}


def refuse(subject: Subject) -> None:
    """Also what torchvision has by that name, but with other weights."""
    _weights(subject, *_constructor(subject))


def write(subject: Subject, path: Path) -> None:
    call, given = _constructor(subject)
    with open(path, "wb") as file:
        torch.save(_weights(subject, call, given), file)
    subject.write_beside(path, {"constructor": f"torchvision.models.{call}", "arguments": given})


def load(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    """As the JSON says."""
    told = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    model = _build(told["constructor"].rpartition(".")[2], told["arguments"])
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def _constructor(subject: Subject) -> tuple[str, dict[str, Any]]:
    """A function of torchvision.models, and its arguments."""
    name = subject.name.partition(".")[0]
    theirs = OTHERS.get(name, name)
    if "patch_embed.proj.weight" in subject.state and not theirs.startswith("swin"):
        vit = plain_vit(subject, "torchvision")
        why = {
            "it takes 3 channels": vit.channels != 3,
            "it has a bias for queries, keys and values": not vit.has_qkv_bias,
            "it has no distillation token": vit.is_distilled,
            f"its LayerNorm has eps {EPS:g}": vit.eps != EPS,
        }
        if others := [reason for reason, holds in why.items() if holds]:
            raise ConfigError(
                f"-to torchvision: {subject.name} differs from its ViT: {', '.join(others)}; use -to hf, onnx or torch"
            )
        return "VisionTransformer", arguments(vit)
    if theirs not in torchvision.models.list_models(torchvision.models):
        raise ConfigError(f"-to torchvision: it has no {subject.name}; use -to hf, onnx, torch or safetensors")
    return "get_model", {"name": theirs, "weights": None, "num_classes": subject.num_classes}


def _build(call: str, given: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return getattr(torchvision.models, call)(**given)


def _weights(subject: Subject, call: str, given: dict[str, Any]) -> dict[str, Tensor]:
    """In torchvision's order, under its names and in its shapes; ConfigError where they are not one to one."""
    theirs, ours = _build(call, given).state_dict(), subject.state
    names = timm_names(theirs)
    differing = names.values() ^ ours.keys() or {
        name for name, timm in names.items() if theirs[name].numel() != ours[timm].numel()
    }
    if differing:
        raise ConfigError(
            f"-to torchvision: its model of the name {subject.name} has other weights ({min(differing)}); use -to hf, onnx, "
            "torch or safetensors"
        )
    return {
        name: ours[names[name]].reshape(tensor.shape).clone() if name in names else tensor
        for name, tensor in theirs.items()
    }
