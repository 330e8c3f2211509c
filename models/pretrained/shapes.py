"""Which ViT a file of weights is of, told by the shapes of its tensors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.formats.files import format_of, shapes_in
from models.pretrained import timm_tags

Settings = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
# Width -> timm's word and the number of heads, which no shape tells, of all ViTs of Google, of DeiT and of PaddleViT.
USUAL = {192: ("tiny", 3), 384: ("small", 6), 768: ("base", 12), 1024: ("large", 16), 1280: ("huge", 16)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def of_vit(path: Path) -> tuple[Settings, Settings] | None:
    """Settings of images and of the model for Google's .npz and PaddleViT's .pdparams; None for other formats.

    Both systems prepare images in one way for all their ViTs. PaddleViT's DeiTs have ImageNet's mean and deviation.
    """
    kind = format_of(path)
    if kind not in ("google", "paddle") or not (found := _vit(shapes_in(path))):
        return None
    images, model, is_distilled = found
    if kind == "google":
        return images | {"DATA.IMAGENET_MEAN": HALF["mean"], "DATA.IMAGENET_STD": HALF["std"]}, model
    crop = {"crop_pct": 1.0 if images["DATA.IMAGE_SIZE"] == 384 else 0.875}
    is_deit = is_distilled or "deit" in path.name.lower()
    return timm_tags.images_of(crop | ({} if is_deit else HALF)) | images, model


def likely_names(path: Path) -> str:
    """The name that timm's model with these shapes probably has; '' for anything but a ViT."""
    import timm

    found = _vit(shapes_in(path))
    if not found:
        return ""
    images, model, is_distilled = found
    name = model["MODEL.NAME"]
    if not is_distilled:
        word = USUAL.get(model["MODEL.EMBED_DIM"], [""])[0]
        name = f"vit_{word}_patch{model['MODEL.PATCH_SIZE']}_{images['DATA.IMAGE_SIZE']}"
    return name if timm.is_model(name) else ""


def _vit(shapes: Shapes) -> tuple[Settings, Settings, bool] | None:
    """Settings of images and of a ViT, and whether it is a distilled DeiT; None for another kind of model."""
    kernel, hidden = shapes.get("patch_embed.proj.weight", ()), shapes.get("blocks.0.mlp.fc1.weight", ())
    tokens = [shapes[name][1] for name in ("pos_embed", "cls_token", "dist_token") if len(shapes.get(name, ())) == 3]
    if len(kernel) != 4 or len(hidden) != 2 or not tokens:
        return None
    width, channels, patch, _ = kernel
    side = math.isqrt(tokens[0] - sum(tokens[1:]))
    images = {"DATA.IMAGE_SIZE": side * patch, "DATA.IMAGE_CHANNELS": channels}
    word, heads = USUAL.get(width, ("", 0))
    if "dist_token" in shapes and word:
        return images, timm_tags.model(f"deit_{word}_distilled_patch{patch}_{side * patch}"), True
    heads = shapes.get("num_heads", (heads,))[0]
    if not heads:
        return None
    model = {
        "MODEL.TYPE": "vit",
        "MODEL.NAME": "vit",
        "MODEL.PATCH_SIZE": patch,
        "MODEL.EMBED_DIM": width,
        "MODEL.DEPTH": sum(name.endswith(".norm1.weight") for name in shapes),
        "MODEL.NUM_HEADS": heads,
        "MODEL.MLP_RATIO": hidden[0] / width,
        "MODEL.QKV_BIAS": "blocks.0.attn.qkv.bias" in shapes,
    }
    return images, model, False
