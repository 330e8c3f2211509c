"""The ViT of the first paper and DeiT's distilled one, all that transformers and PaddleViT have."""

import re
from functools import partial

import torch
from torch import nn

from models.export.subject import Subject, WrongExport, largest_difference
from utils.errors import ConfigError

PADDLE_EPS = 1e-6  # of LayerNorm in PaddleViT
BLOCK = r"blocks\.\d+\.((norm[12]|attn\.proj|mlp\.fc[12])\.(weight|bias)|attn\.qkv\.(weight|bias))"
AROUND = r"cls_token|dist_token|pos_embed|(patch_embed\.proj|norm|head|head_dist)\.(weight|bias)"


def refuse_other_models(subject: Subject, to: str) -> None:
    """ConfigError unless it is a plain ViT or a distilled DeiT. `to`: the format, for the message."""
    try:
        _check(subject)
    except (RuntimeError, ValueError, WrongExport) as error:
        raise ConfigError(
            f"-to {to}: {subject.name} is not the plain ViT that it takes ({error}); use -to hf, onnx, torch or safetensors"
        ) from error
    if to == "paddle" and (eps := subject.model.norm.eps) != PADDLE_EPS:
        raise ConfigError(
            f"-to paddle: LayerNorm of {subject.name} has eps {eps:g}, in PaddleViT {PADDLE_EPS:g}; use -to onnx"
        )


def is_distilled(subject: Subject) -> bool:
    return "dist_token" in subject.state


def _check(subject: Subject) -> None:
    model, state = subject.model, subject.state
    other = next((name for name in state if not re.fullmatch(f"{AROUND}|{BLOCK}", name)), None)
    if other:
        raise ValueError(f"it has no place for {other}")
    if not is_distilled(subject):
        largest_difference(subject, _plain_model(model, state))  # the logits tell a difference that no name tells
    elif subject.config.MODEL.KWARGS or not subject.name.startswith("deit_"):
        raise ValueError("with a distillation token it takes timm's deit_*_distilled models only")


def _plain_model(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    """timm's ViT as it is without any option, with these weights."""
    from timm.models.vision_transformer import VisionTransformer

    (eps,) = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    with torch.random.fork_rng(devices=[]):
        plain = VisionTransformer(
            img_size=model.patch_embed.img_size,
            patch_size=model.patch_embed.patch_size,
            in_chans=state["patch_embed.proj.weight"].shape[1],
            num_classes=len(state["head.weight"]),
            embed_dim=model.embed_dim,
            depth=len(model.blocks),
            num_heads=model.blocks[0].attn.num_heads,
            mlp_ratio=len(state["blocks.0.mlp.fc1.weight"]) / model.embed_dim,
            qkv_bias="blocks.0.attn.qkv.bias" in state,
            norm_layer=partial(nn.LayerNorm, eps=eps),
        )
    plain.load_state_dict(state)
    return plain.eval()
