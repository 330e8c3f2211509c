"""What the config.json says that lies beside weights in a folder as the Hugging Face hub has them: timm's and transformers'."""

import json
from pathlib import Path
from typing import Any

from models.kwargs import SETTING_OF
from models.weights import timm_tags
from models.weights.names import TRANSFORMERS_KINDS
from utils.errors import ConfigError

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
LARGEST_EPS = 1e-5  # timm's ViTs have 1e-6; others of up to that give the same figures in fp32 and half types
Settings = dict[str, Any]


def of_folder(path: Path) -> tuple[Settings, Settings] | None:
    """Settings of images and of the model; None if there is no config.json, or it names no model."""
    config = read_json(path.with_name("config.json"))
    try:
        if isinstance(config.get("architecture"), str):
            return _of_timm(config)
        if "model_type" not in config:
            return None
        if config["model_type"] not in TRANSFORMERS_KINDS:
            raise ConfigError(
                f"{path.parent}: its model is {config['model_type']!r} of transformers, of which only "
                f"{' and '.join(TRANSFORMERS_KINDS)} are read; look for the same weights among timm's (timm.list_pretrained())"
            )
        return _images_of_transformers(path, config), _vit_of_transformers(config)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path.with_name('config.json')}: not as timm or transformers write it ({found})") from None


def class_names(path: Path) -> list[str]:
    """The names of the classes, where config.json has them."""
    config = read_json(path.with_name("config.json"))
    names = config.get("label_names", config.get("id2label"))
    if isinstance(names, dict) and all(str(number).isdecimal() for number in names):
        names = [names[number] for number in sorted(names, key=int)]
    is_told = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_told and names != [f"LABEL_{number}" for number in range(len(names))] else []


def read_json(path: Path) -> dict:
    """A JSON file with a dict; {} if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: damaged, or not JSON ({error}); fetch the folder again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a mapping of names to values; fetch the folder again")
    return content


def _of_timm(config: dict) -> tuple[Settings, Settings]:
    """Of the model's arguments, size and channels are settings of the images; others with a setting are of its training."""
    # At first, timm wrote the facts of the weights beside the architecture.
    known, arguments = config.get("pretrained_cfg", config), dict(config.get("model_args") or {})
    channels, *sides = known.get("input_size") or (3, 224, 224)
    size = arguments.get("img_size") or sides
    given = {"input_size": [arguments.get("in_chans", channels), *(size if isinstance(size, list) else (size, size))]}
    others = {name: value for name, value in arguments.items() if name not in SETTING_OF}
    return timm_tags.images_of(known, given), timm_tags.model(config["architecture"], others)


def _images_of_transformers(path: Path, config: dict) -> Settings:
    """Its image processors resize to exactly `size`, whatever the shape of the image, and may cut out the centre then."""
    known = read_json(path.with_name("preprocessor_config.json"))
    side = config["image_size"]
    if not known:
        return {"DATA.IMAGE_SIZE": side}
    size, crop = _side(known.get("size", side)), _side(known.get("crop_size", side))
    # An image processor of the first years crops only where it says so.
    is_cropped = known.get("do_center_crop", False)
    mode = "center" if isinstance(known.get("size"), dict) and "shortest_edge" in known["size"] else "squash"
    facts = {"input_size": (config.get("num_channels", 3),) + (crop if is_cropped else size,) * 2, "crop_mode": mode}
    facts |= {"mean": known["image_mean"], "std": known["image_std"], "interpolation": RESAMPLE[known["resample"]]}
    return timm_tags.images_of(facts | {"crop_pct": timm_tags.crop_pct(crop, size) if is_cropped else 1.0})


def _side(size: int | dict) -> int:
    """18 of 18, {height: 18, width: 18} and {shortest_edge: 18}."""
    sides = set(size.values()) if isinstance(size, dict) else {size}
    if len(sides) != 1:
        raise ValueError(f"images that are not square: {size}")
    return sides.pop()


def _vit_of_transformers(config: dict) -> Settings:
    if config.get("hidden_act", "gelu") != "gelu" or config.get("layer_norm_eps", 1e-12) > LARGEST_EPS:
        raise ValueError("hidden_act is not gelu, or layer_norm_eps above 1e-5, as no ViT of timm has it")
    width = config["hidden_size"]
    if config["model_type"] == "deit":
        names = {192: "tiny", 384: "small", 768: "base"}
        return timm_tags.model(f"deit_{names[width]}_distilled_patch{config['patch_size']}_224")
    return {
        "MODEL.TYPE": "vit",
        "MODEL.NAME": "vit",
        "MODEL.PATCH_SIZE": config["patch_size"],
        "MODEL.EMBED_DIM": width,
        "MODEL.DEPTH": config["num_hidden_layers"],
        "MODEL.NUM_HEADS": config["num_attention_heads"],
        "MODEL.MLP_RATIO": config["intermediate_size"] / width,
        "MODEL.QKV_BIAS": config.get("qkv_bias", True),
    }
