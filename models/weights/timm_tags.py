"""timm's pretrained weights by name: whether there are any, how their images were prepared, which classes they know."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.weights.files import SUFFIXES
from utils.errors import ConfigError, did_you_mean

IMAGENET_CLASSES = 1000


def timm_name(source: str) -> str:
    """The name in timm of weights that may be named as on its hub: hf-hub:timm/NAME or timm/NAME."""
    if re.match(r"(hf-hub|hf_hub):(?!timm/)", source):
        repository = source.partition(":")[2]
        raise ConfigError(
            f"{source}: of the hub only timm's own weights are fetched; download it (hf download {repository} "
            "--local-dir FOLDER) and name the folder: -pretrained FOLDER"
        )
    return re.sub(r"^((hf-hub|hf_hub):)?timm/", "", source)


def pretrained_cfg(source: str) -> dict[str, Any]:
    """What timm knows of its pretrained weights of that name; ConfigError if it has none."""
    import timm

    name = timm_name(source)
    if timm.models.is_model_pretrained(name):
        return timm.get_pretrained_cfg(name).to_dict()
    nearest = did_you_mean(name, timm.list_pretrained() if "." in name else timm.list_models())
    if not timm.is_model(name):
        tried = f"no file at {name}, nor with {', '.join(SUFFIXES)} added"
        raise ConfigError(f"{tried}, and timm has no model of this name{nearest}")
    raise ConfigError(f"timm has no pretrained weights of {name}{nearest or '; start from random weights without it'}")


def images_of(known: Mapping[str, Any], trained_with: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How images were prepared, as settings, from a pretrained_cfg of timm's.

    `trained_with`: the arguments of timm's train.py, where they were others.
    """
    from timm.data import resolve_data_config

    found = resolve_data_config(dict(trained_with or {}), pretrained_cfg=dict(known))
    channels, height, width = found["input_size"]
    images = {
        "DATA.IMAGE_CHANNELS": channels,
        "DATA.CROP_PCT": found["crop_pct"],
        "DATA.CROP_MODE": found["crop_mode"],
        "DATA.INTERPOLATION": found["interpolation"],
        "DATA.IMAGENET_MEAN": list(found["mean"]),
        "DATA.IMAGENET_STD": list(found["std"]),
    }
    return images | ({"DATA.IMAGE_SIZE": height} if height == width else {})


def model(name: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings that build timm's model of that name; `arguments`: of its constructor, if there are any."""
    return {"MODEL.TYPE": "timm", "MODEL.NAME": name} | ({"MODEL.KWARGS": dict(arguments)} if arguments else {})


def crop_pct(side: int, resized: int) -> float:
    """The fraction that timm and halfstep turn into exactly `resized`: they round side / crop_pct down."""
    fraction = side / resized
    return fraction if math.floor(side / fraction) == resized else math.nextafter(fraction, 0)


def classes_of(known: Mapping[str, Any]) -> list[str]:
    """The names of the classes of a classifier for ImageNet: its synsets; [] for any other."""
    from timm.data import ImageNetInfo

    return ImageNetInfo().label_names() if known.get("num_classes") == IMAGENET_CLASSES else []


def is_imagenet_by_other_names(classes: Sequence[str]) -> bool:
    """Whether these are ImageNet's classes in its order, by number, as in lists, or by description, as in parquet files."""
    from timm.data import ImageNetInfo

    if len(classes) != IMAGENET_CLASSES:
        return False
    return all(name.isdecimal() for name in classes) or list(classes) == ImageNetInfo().label_descriptions()
