"""What the checkpoints of timm's and torchvision's training scripts say of their model and its images."""

from pathlib import Path
from typing import Any

from models.pretrained import timm_tags
from utils.errors import ConfigError

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
