"""Whether a model is the ViT of the first paper, or DeiT's with a distillation token: what other systems call ViT and DeiT."""

import math
import re
from typing import NamedTuple

import torch
from torch import nn

from models.export.check import WrongExport, largest_difference
from models.export.subject import Subject
from models.weights import names
from utils.errors import ConfigError

EPS = 1e-6  # of LayerNorm, in torchvision and PaddleViT
BLOCK = r"blocks\.\d+\.((norm[12]|attn\.proj|mlp\.fc[12])\.(weight|bias)|attn\.qkv\.(weight|bias))"
AROUND = r"cls_token|dist_token|pos_embed|(patch_embed\.proj|norm|head|head_dist)\.(weight|bias)"


class PlainVit(NamedTuple):
    width: int
    depth: int
    heads: int
    hidden: int  # width inside the MLP
    patch: int
    side: int
    channels: int
    num_classes: int
    eps: float
    has_qkv_bias: bool
    is_distilled: bool


def plain_vit(subject: Subject, to: str) -> PlainVit:
    """Its measures; ConfigError if it is another model. `to`: the format, for the message."""
    try:
        vit = _measures(subject)
        if not vit.is_distilled:  # torchvision has the one, whose logits would tell a difference that no name tells
            largest_difference(subject, reference(subject, vit))
        return vit
    except (KeyError, RuntimeError, ValueError, WrongExport) as error:
        raise ConfigError(
            f"-to {to}: {subject.name} is not the plain ViT that it takes ({error}); use -to hf, onnx, torch or safetensors"
        ) from error


def _measures(subject: Subject) -> PlainVit:
    model, state = subject.model, subject.state
    other = next((name for name in state if not re.fullmatch(f"{AROUND}|{BLOCK}", name)), None)
    if other:
        raise ValueError(f"it has no place for {other}")
    is_distilled = "dist_token" in state
    if is_distilled and (subject.config.MODEL.KWARGS or not subject.name.startswith("deit_")):
        raise ValueError("with a distillation token it takes timm's deit_*_distilled models only")
    width, channels, patch, _ = state["patch_embed.proj.weight"].shape
    side = subject.config.DATA.IMAGE_SIZE
    if state["pos_embed"].shape[1] != (side // patch) ** 2 + 1 + is_distilled:
        raise ValueError(f"its position embedding is not one for each patch and class token of a {side} x {side} image")
    eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    return PlainVit(
        width=width,
        depth=sum(name.endswith(".norm1.weight") for name in state),
        heads=model.blocks[0].attn.num_heads,
        hidden=len(state["blocks.0.mlp.fc1.weight"]),
        patch=patch,
        side=side,
        channels=channels,
        num_classes=len(state["head.weight"]),
        eps=eps.pop() if len(eps) == 1 else math.nan,
        has_qkv_bias="blocks.0.attn.qkv.bias" in state,
        is_distilled=is_distilled,
    )


def arguments(vit: PlainVit) -> dict[str, int]:
    """Of torchvision's VisionTransformer."""
    sizes = {"image_size": vit.side, "patch_size": vit.patch, "num_layers": vit.depth, "num_heads": vit.heads}
    return sizes | {"hidden_dim": vit.width, "mlp_dim": vit.hidden, "num_classes": vit.num_classes}


def reference(subject: Subject, vit: PlainVit) -> nn.Module:
    """torchvision's ViT with these weights, widened to any number of channels and to queries without bias."""
    from torchvision.models import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer(**arguments(vit), norm_layer=lambda width: nn.LayerNorm(width, eps=vit.eps))
        model.conv_proj = nn.Conv2d(vit.channels, vit.width, vit.patch, stride=vit.patch)
    state, theirs = subject.state, model.state_dict()
    named = names.timm_names_of_torchvision(theirs)
    zeros = {name: torch.zeros(3 * vit.width) for name in named.values() if name.endswith(".attn.qkv.bias")}
    model.load_state_dict({name: (zeros | state)[named[name]] for name in theirs})
    return model.eval()
