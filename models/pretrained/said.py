"""What pretrained weights say of themselves: how their images were prepared, and their architecture."""

from pathlib import Path
from typing import Any, NamedTuple

from configs.removed import translate_saved
from configs.schema import VIT_FIELDS
from models.formats.files import find_file, what_is_recorded
from models.pretrained import hugging_face, shapes, timm_tags
from models.pretrained.training_files import of_another_program

# What an evaluation, or a run that starts from weights, takes over from them.
ARCHITECTURE = tuple(f"MODEL.{name}" for name in ("TYPE", "NAME", *VIT_FIELDS, "KWARGS"))
PREPROCESSING = tuple(
    f"DATA.{name}"
    for name in "IMAGE_SIZE IMAGE_CHANNELS CROP_PCT CROP_MODE INTERPOLATION IMAGENET_MEAN IMAGENET_STD".split()
)


class Said(NamedTuple):
    """The settings that follow from weights, by their full names."""

    by: str  # a name of timm's weights, or a file
    images: dict[str, Any]  # some of PREPROCESSING
    model: dict[str, Any]  # some of ARCHITECTURE; empty where the weights do not say which model they are of
    likely: str = ""  # names of models that they may be of, by their shapes


def what_weights_say(source: str) -> Said:
    """What the file, the folder or timm's weights of that name say; reads no tensors where shapes can be had without."""
    path = find_file(source)
    if path is None:
        name = timm_tags.timm_name(source)
        return Said(f"{name} (timm)", timm_tags.images_of(timm_tags.pretrained_cfg(source)), timm_tags.model(name))
    return what_file_says(path)


def what_file_says(path: Path) -> Said:
    record = what_is_recorded(path)
    config = record.get("config", {})
    if "MODEL.TYPE" in config:  # of ours; before there was the setting, the centre was cropped
        config = {"DATA.CROP_MODE": "center"} | config
        translate_saved(config, ("model",))  # a model that is built no more is refused
        images = {key: config[key] for key in PREPROCESSING if key in config}
        return Said(str(path), images, {key: config[key] for key in ARCHITECTURE if key in config})
    found = hugging_face.of_folder(path) or of_another_program(record, path) or shapes.of_vit(path)
    images, model = found or ({}, {})
    return Said(str(path), images, model, "" if model else shapes.likely_names(path))


def classes_of_weights(source: str) -> list[str]:
    """The names of the classes of their classifier, where weights of other programs say them."""
    path = find_file(source)
    return hugging_face.class_names(path) if path else timm_tags.classes_of(timm_tags.pretrained_cfg(source))
