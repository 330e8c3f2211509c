"""What pretrained weights say of themselves: how their images were prepared, and their architecture."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from configs.removed import translate_removed
from configs.schema import MODEL
from configs.values import of_role
from models.weights import hugging_face, timm_tags
from models.weights.files import find_file, format_of, read_record, shapes_in
from utils.errors import ConfigError

# What an evaluation, or a run that starts from weights, takes over from them.
ARCHITECTURE, PREPROCESSING = (
    tuple(key for key in of_role(MODEL) if key.startswith(section)) for section in ("MODEL.", "DATA.")
)


class WeightsMetadata(NamedTuple):
    """The settings that follow from weights, by their full names."""

    by: str  # a name of timm's weights, or a file
    images: dict[str, Any]  # some of PREPROCESSING
    model: dict[str, Any]  # some of ARCHITECTURE; empty where the weights do not say which model they are of
    likely: str = ""  # names of models that they may be of, by their shapes


def metadata_of(source: str) -> WeightsMetadata:
    """What the file, the folder or timm's weights of that name say; reads no tensors where shapes can be had without."""
    path = find_file(source)
    if path is None:
        name = timm_tags.timm_name(source)
        return WeightsMetadata(
            f"{name} (timm)", timm_tags.images_of(timm_tags.pretrained_cfg(source)), timm_tags.model(name)
        )
    return metadata_of_file(path)


def metadata_of_file(path: Path) -> WeightsMetadata:
    record = read_record(path)
    config = record.get("config", {})
    if "MODEL.TYPE" in config:  # of ours; before there was the setting, the centre was cropped
        config = {"DATA.CROP_MODE": "center"} | config
        translate_removed(config, config, str(path), ("model",))  # a model that is built no more is refused
        images = {key: config[key] for key in PREPROCESSING if key in config}
        return WeightsMetadata(str(path), images, {key: config[key] for key in ARCHITECTURE if key in config})
    found = hugging_face.of_folder(path) or of_another_program(record, path) or of_vit(path)
    images, model = found or ({}, {})
    return WeightsMetadata(str(path), images, model, "" if model else likely_names(path))


def classes_of_weights(source: str) -> list[str]:
    """The names of the classes of their classifier, where weights of other programs say them."""
    path = find_file(source)
    return hugging_face.class_names(path) if path else timm_tags.classes_of(timm_tags.pretrained_cfg(source))


# Arguments of timm's train.py that decide how images are prepared for evaluation.
TIMM_ARGUMENTS = ("in_chans", "input_size", "img_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
# torchvision's names that differ from timm's.
TORCHVISION_NAMES = {
    "vit_b_16": "vit_base_patch16_224",
    "vit_b_32": "vit_base_patch32_224",
    "vit_l_16": "vit_large_patch16_224",
    "vit_l_32": "vit_large_patch32_224",
    "vit_h_14": "vit_huge_patch14_224",
    "swin_t": "swin_tiny_patch4_window7_224",
    "swin_s": "swin_small_patch4_window7_224",
    "swin_b": "swin_base_patch4_window7_224",
}


def of_another_program(record: dict, path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Settings of images and of the model; None if no such program wrote the file.

    `record`: plain values of the file. Whoever writes `arch` alone does not say how images were prepared.
    """
    import timm

    arguments, name = record.get("args", {}), record.get("arch")
    try:
        if "val_crop_size" in arguments and isinstance(arguments.get("model"), str):
            name = TORCHVISION_NAMES.get(arguments["model"], arguments["model"])
            return _of_torchvision(arguments), timm_tags.model(name)
        if not name or not timm.is_model(name):
            return None
        known = timm.get_pretrained_cfg(name)
        given = {key: arguments.get(key) for key in TIMM_ARGUMENTS}
        images = timm_tags.images_of(known.to_dict() if known else {}, given) if arguments else {}
        return images, timm_tags.model(name)
    except (ArithmeticError, AssertionError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{path}: its `args` do not say how images were prepared ({type(error).__name__}: {error}); save the weights alone"
        ) from None


def _of_torchvision(arguments: dict[str, Any]) -> dict[str, Any]:
    side, resized = int(arguments["val_crop_size"]), int(arguments["val_resize_size"])
    known = {"input_size": (3, side, side), "crop_pct": timm_tags.crop_pct(side, resized)}
    return timm_tags.images_of(known | {"interpolation": arguments["interpolation"]})


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
