"""timm's pretrained weights by name: their metadata, preprocessing and settings."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.weights.files import SUFFIXES
from utils.errors import ConfigError, did_you_mean
from utils.torch_internals import import_timm


def timm_name(source: str) -> str:
    """Return timm's name for weights that may be named as on the hub: hf-hub:timm/NAME or timm/NAME."""
    if re.match(r"(hf-hub|hf_hub):(?!timm/)", source):
        repository = source.partition(":")[2]
        raise ConfigError(
            f"{source}: only timm's own weights are fetched from the hub; download the repository (hf download {repository} "
            "--local-dir FOLDER) and name the folder: -pretrained FOLDER"
        )
    return re.sub(r"^((hf-hub|hf_hub):)?timm/", "", source)


def pretrained_cfg(source: str) -> dict[str, Any]:
    """Return timm's metadata of the pretrained weights of this name. Raise ConfigError if timm has none."""
    timm = import_timm()
    name = timm_name(source)
    if timm.models.is_model_pretrained(name):
        return timm.get_pretrained_cfg(name).to_dict()
    nearest = did_you_mean(name, timm.list_pretrained() if "." in name else timm.list_models())
    if timm.is_model(name):
        raise ConfigError(f"timm has no pretrained weights for {name}{nearest or '; start from random weights'}")
    tried = f"there is no file {name}, with or without a suffix ({', '.join(SUFFIXES)})"
    raise ConfigError(f"{tried}, and timm has no model of this name{nearest or '; check the name'}")


def image_settings(known: Mapping[str, Any], trained_with: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return preprocessing settings from timm's pretrained_cfg. Arguments for train.py (`trained_with`) override it."""
    from timm.data import resolve_data_config

    facts = resolve_data_config(dict(trained_with or {}), pretrained_cfg=dict(known))
    channels, height, width = facts["input_size"]
    images = {
        "DATA.IMAGE_CHANNELS": channels,
        "DATA.CROP_PCT": facts["crop_pct"],
        "DATA.CROP_MODE": facts["crop_mode"],
        "DATA.INTERPOLATION": facts["interpolation"],
        "DATA.IMAGENET_MEAN": list(facts["mean"]),
        "DATA.IMAGENET_STD": list(facts["std"]),
    }
    return images | ({"DATA.IMAGE_SIZE": height} if height == width else {})


def usual_images(name: str) -> dict[str, Any]:
    """Return the preprocessing of this model's timm weights, or {} if timm has none."""
    timm = import_timm()
    with contextlib.suppress(RuntimeError):  # an unknown tag is reported when the model is built
        known = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
        return image_settings(known.to_dict()) if known else {}
    return {}


def model_settings(name: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that build timm's model of this name. `arguments` are for its constructor."""
    return {"MODEL.TYPE": "timm", "MODEL.NAME": name} | ({"MODEL.KWARGS": dict(arguments)} if arguments else {})


def is_imagenet_by_other_names(classes: Sequence[str]) -> bool:
    """Return whether these are ImageNet's classes in order, as numbers (from lists) or descriptions (from parquet)."""
    from timm.data import ImageNetInfo

    if len(classes) != 1000:
        return False
    return all(name.isdecimal() for name in classes) or list(classes) == ImageNetInfo().label_descriptions()
