"""timm's pretrained weights by name: whether there are any, how their images were prepared, which classes they know."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.weights.files import SUFFIXES
from utils.errors import ConfigError, did_you_mean
from utils.torch_internals import import_timm


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
    timm = import_timm()
    name = timm_name(source)
    if timm.models.is_model_pretrained(name):
        return timm.get_pretrained_cfg(name).to_dict()
    nearest = did_you_mean(name, timm.list_pretrained() if "." in name else timm.list_models())
    if timm.is_model(name):
        raise ConfigError(f"timm has no pretrained weights of {name}{nearest or '; start from random weights'}")
    tried = f"no file at {name}, nor with {', '.join(SUFFIXES)} added"
    raise ConfigError(f"{tried}, and timm has no model of this name{nearest}")


def image_settings(known: Mapping[str, Any], trained_with: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How images were prepared, from a pretrained_cfg of timm's and the arguments of its train.py, which win."""
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
    """How images of timm's weights of the model of that name are prepared; {} where timm has none."""
    timm = import_timm()
    with contextlib.suppress(RuntimeError):  # of a tag that there is not, which building the model names
        known = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
        return image_settings(known.to_dict()) if known else {}
    return {}


def model_settings(name: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings that build timm's model of that name; `arguments`: of its constructor, if there are any."""
    return {"MODEL.TYPE": "timm", "MODEL.NAME": name} | ({"MODEL.KWARGS": dict(arguments)} if arguments else {})


def is_imagenet_by_other_names(classes: Sequence[str]) -> bool:
    """Whether these are ImageNet's classes in its order, by number, as in lists, or by description, as in parquet files."""
    from timm.data import ImageNetInfo

    if len(classes) != 1000:
        return False
    return all(name.isdecimal() for name in classes) or list(classes) == ImageNetInfo().label_descriptions()
