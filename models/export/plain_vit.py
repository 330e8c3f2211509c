"""Recognises plain models, the only ones exported for transformers: the original ViT and DeiT's distilled variant."""

import re
from functools import partial

import torch
from torch import nn

from models.export.subject import Subject, WrongExport, largest_difference

BLOCK = r"blocks\.\d+\.((norm[12]|attn\.proj|mlp\.fc[12])\.(weight|bias)|attn\.qkv\.(weight|bias))"
AROUND = r"cls_token|dist_token|pos_embed|(patch_embed\.proj|norm|head|head_dist)\.(weight|bias)"


def is_plain(subject: Subject) -> bool:
    """Return whether the model is a plain ViT or one of timm's deit_*_distilled models."""
    if not all(re.fullmatch(f"{AROUND}|{BLOCK}", name) for name in subject.state):
        return False
    if is_distilled(subject):
        return not subject.config.MODEL.KWARGS and subject.name.startswith("deit_")
    try:
        # Comparing logits finds differences that the names of the weights do not show.
        largest_difference(subject, _plain_model(subject.model, subject.state))
    except (RuntimeError, ValueError, WrongExport):
        return False
    return True


def is_distilled(subject: Subject) -> bool:
    return "dist_token" in subject.state


def _plain_model(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    """Return timm's ViT with these weights and sizes, and with the default of every other option."""
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
