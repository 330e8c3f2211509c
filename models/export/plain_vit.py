"""The ViT of the first paper and DeiT's distilled one, all that transformers and PaddleViT have; PaddleViT's .pdparams."""

import math
import pickle
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from models.export.subject import Format, Subject, WrongExport, largest_difference
from models.weights.paddle import to_paddle
from utils.errors import ConfigError

EPS = 1e-6  # of LayerNorm in PaddleViT
PROTOCOL = 4  # paddle.save's own
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
        if not vit.is_distilled:  # the logits tell a difference that no name tells
            largest_difference(subject, _reference(subject, vit))
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


def _reference(subject: Subject, vit: PlainVit) -> nn.Module:
    """timm's ViT as it is without any option, with these weights."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer(
            img_size=vit.side,
            patch_size=vit.patch,
            in_chans=vit.channels,
            num_classes=vit.num_classes,
            embed_dim=vit.width,
            depth=vit.depth,
            num_heads=vit.heads,
            mlp_ratio=vit.hidden / vit.width,
            qkv_bias=vit.has_qkv_bias,
            norm_layer=partial(nn.LayerNorm, eps=vit.eps),
        )
    model.load_state_dict(subject.state)
    return model.eval()


def _refuse(subject: Subject) -> None:
    vit = plain_vit(subject, "paddle")
    if vit.eps != EPS:
        raise ConfigError(
            f"-to paddle: LayerNorm of {subject.name} has eps {vit.eps:g}, in PaddleViT {EPS:g}; use -to onnx"
        )


def _write(subject: Subject, path: Path) -> None:
    with open(path, "wb") as file:
        pickle.dump(to_paddle(subject.state), file, protocol=PROTOCOL)
    subject.write_beside(path, {"format": "PaddleViT, names of 2022"})


PADDLE = Format(
    ".pdparams", "halfstep's reader of .pdparams", _write, lambda subject, path: subject.read_back(path).model, _refuse
)
