"""Metadata of pretrained weights: preprocessing of images, architecture, class names and temperature."""

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import MODEL, Shape
from configs.values import of_role
from models.kwargs import SETTING_BY_TYPE, SETTING_OF
from models.weights.files import SUFFIXES, find_file, format_of, read_record, read_state_dict
from models.weights.names import TRANSFORMERS_KINDS
from models.weights.record import CALIBRATION, KNOWN, OF_PIXELS
from utils.commands import HALFSTEP
from utils.errors import ConfigError, did_you_mean, naming_damage
from utils.files import content_of, short_name
from utils.torch_internals import import_timm

# The settings that an evaluation, or a run with pretrained weights, takes from the weights.
ARCHITECTURE, PREPROCESSING = (
    tuple(key for key in of_role(MODEL) if key.startswith(section)) for section in ("MODEL.", "DATA.")
)
Settings = dict[str, Any]  # {full name: value}


class WeightsMetadata(NamedTuple):
    """The settings that are derived from weights."""

    by: str  # the name of timm weights, or a file
    images: Settings = {}  # some settings of PREPROCESSING
    model: Settings = {}  # some settings of ARCHITECTURE; empty if the weights do not name their model


def metadata_of(source: str) -> WeightsMetadata:
    """Return the metadata of the weights in a file or folder, or of timm's weights of this name."""
    path = find_file(source)
    if path is None:
        name = timm_name(source)
        return WeightsMetadata(f"{name} (timm)", image_settings(pretrained_cfg(source)), model_settings(name))
    by, record = short_name(path), read_record(path)
    config = record.get("config", {})
    if "MODEL.TYPE" in config:  # a run of halfstep
        parts = ({key: config[key] for key in keys if key in config} for keys in (PREPROCESSING, ARCHITECTURE))
        return WeightsMetadata(by, *parts)
    with naming_damage(f"{path}, its config.json or `args`", AssertionError):
        return WeightsMetadata(by, *(_from_config(path, record) or _from_training(record) or _from_shapes(path) or ()))


def classes_of_weights(source: str) -> list[str]:
    """Return the class names stored with weights of other programs, or [] if there are none."""
    from timm.data import ImageNetInfo

    path = find_file(source)
    if path is None:
        return ImageNetInfo().label_names() if pretrained_cfg(source).get("num_classes") == 1000 else []
    config = _config_of(path, read_record(path))
    names = config.get("label_names", config.get("id2label"))
    if isinstance(names, dict) and all(str(number).isdecimal() for number in names):
        names = [names[number] for number in sorted(names, key=int)]
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if are_names and names != [f"LABEL_{number}" for number in range(len(names))] else []


# --- the config.json in a folder as on the Hugging Face hub, or in the weights that come with halfstep

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
LARGEST_EPS = 1e-5  # timm's ViTs use 1e-6; all values up to this limit give the same scores in fp32 and half types


def _config_of(path: Path, record: dict) -> dict:
    """Return the content of the config.json next to the weights, else the one in their metadata, else {}."""
    return _read_json(path.with_name("config.json")) or record.get("timm_config", {})


def _from_config(path: Path, record: dict) -> tuple[Settings, Settings] | None:
    """Return the image and model settings in config.json, or None if it is missing or names no model."""
    config = _config_of(path, record)
    if isinstance(config.get("architecture"), str):
        return _from_timms_config(config)
    if "model_type" not in config:
        return None
    if config["model_type"] not in TRANSFORMERS_KINDS:
        raise ConfigError(
            f"{path.parent}: its model_type is {config['model_type']!r}, but of transformers' models only "
            f"{' and '.join(TRANSFORMERS_KINDS)} are supported; look for the same weights in timm "
            "(timm.list_pretrained())"
        )
    return _transformers_images(path, config), _transformers_model(config)


def _read_json(path: Path) -> dict:
    """Return the dict in a JSON file, or {} if there is no file."""
    with naming_damage(path, OSError):
        content = json.loads(content_of(path)) if path.exists() else {}
        if not isinstance(content, dict):
            raise ValueError("not a mapping of names to values")
        return content


def _from_timms_config(config: dict) -> tuple[Settings, Settings]:
    """Return the image and model settings in timm's config.json.

    The image size and channels among the model's arguments become image settings. Other arguments with a setting of
    their own are left out, because they only concern training.
    """
    # Early versions of timm wrote pretrained_cfg's values at the top level.
    facts, arguments = config.get("pretrained_cfg", config), dict(config.get("model_args") or {})
    channels, *sides = facts.get("input_size") or (3, 224, 224)
    size = arguments.get("img_size") or sides
    input_size = [arguments.get("in_chans", channels), *(size if isinstance(size, list) else (size, size))]
    others = {name: value for name, value in arguments.items() if name not in SETTING_OF}
    return image_settings(facts, {"input_size": input_size}), model_settings(config["architecture"], others)


def _transformers_images(path: Path, config: dict) -> Settings:
    """Return the image settings from the configuration of a transformers image processor.

    An image processor resizes every image to exactly `size`, and may then cut out the centre.
    """
    known = _read_json(path.with_name("preprocessor_config.json"))
    shape = _shape(config["image_size"])
    if not known:
        return {"DATA.IMAGE_SIZE": shape.size}
    size, crop = _shape(known.get("size", shape)), _shape(known.get("crop_size", shape))
    # The first versions of image processors crop only if do_center_crop is set.
    is_cropped = known.get("do_center_crop", False)
    mode = "center" if isinstance(known.get("size"), dict) and "shortest_edge" in known["size"] else "squash"
    facts = {"input_size": (config.get("num_channels", 3), *(crop if is_cropped else size)), "crop_mode": mode}
    facts |= {"mean": known["image_mean"], "std": known["image_std"], "interpolation": RESAMPLE[known["resample"]]}
    return image_settings(facts | {"crop_pct": _crop_pct(crop, size) if is_cropped else 1.0})


def _shape(size: int | list | dict) -> Shape:
    """Return the shape of a size: 18 x 18 for 18 and {shortest_edge: 18}, and 18 x 24 for {height: 18, width: 24}."""
    if isinstance(size, dict) and "height" in size:
        return Shape(size["height"], size["width"])
    if isinstance(size, list) and len(size) == 2:
        return Shape(*size)
    sides = {*size.values()} if isinstance(size, dict) else {size}
    if len(sides) != 1:
        raise ValueError(f"the images have no single size: {size}")
    side = sides.pop()
    return Shape(side, side)


def _transformers_model(config: dict) -> Settings:
    if config.get("hidden_act", "gelu") != "gelu" or config.get("layer_norm_eps", 1e-12) > LARGEST_EPS:
        raise ValueError("hidden_act is not gelu, or layer_norm_eps is above 1e-5, which timm's ViTs do not support")
    width, patch = config["hidden_size"], config["patch_size"]
    if config["model_type"] == "deit":
        return model_settings(f"deit_{USUAL[width][0]}_distilled_patch{patch}_224")
    depth, heads = config["num_hidden_layers"], config["num_attention_heads"]
    return _vit_settings(patch, width, depth, heads, config["intermediate_size"], config.get("qkv_bias", True))


# --- the command line that timm's training script saves

# Arguments of timm's train.py that decide the preprocessing for evaluation. OF_THE_MODEL has the arguments for the
# model that are not in --model-kwargs, with their names in the model's constructor.
TIMM_ARGUMENTS = ("in_chans", "input_size", "img_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
OF_THE_MODEL = {"gp": "global_pool", "bn_eps": "bn_eps", "bn_momentum": "bn_momentum"}


def _from_training(record: dict) -> tuple[Settings, Settings] | None:
    """Return the image and model settings from the command line that timm stored, or None if there is none."""
    timm = import_timm()
    arguments, name = record.get("args", {}), record.get("arch")
    if not name or not timm.is_model(name):
        return None
    known = timm.get_pretrained_cfg(name)
    built = {timm_name: arguments[key] for key, timm_name in OF_THE_MODEL.items() if arguments.get(key) is not None}
    built |= arguments.get("model_kwargs") or {}
    image_arguments = {key: built.get(key) if arguments.get(key) is None else arguments[key] for key in TIMM_ARGUMENTS}
    if wrong := [key for key, value in built.items() if isinstance(value, dict)]:
        raise ValueError(f"--model-kwargs {wrong[0]} is a mapping, which MODEL.KWARGS does not support")
    of_its_training = SETTING_OF.keys() | SETTING_BY_TYPE["timm"].keys()
    kwargs = {key: value for key, value in built.items() if key not in of_its_training}
    if not (arguments or known):
        return {}, model_settings(name, kwargs)
    return image_settings(known.to_dict() if known else {}, image_arguments), model_settings(name, kwargs)


def _crop_pct(crop: Shape, resized: Shape) -> float:
    """Return the crop_pct for which crop / crop_pct, rounded down as in timm and halfstep, is exactly `resized`."""
    fraction = crop.height / resized.height
    for share in (fraction, math.nextafter(fraction, 0)):
        if Shape(*(math.floor(side / share) for side in crop)) == resized:
            return share
    raise ValueError(f"a crop of {crop} from {resized} has no common ratio of its sides")


# --- the shapes in Google's .npz and PaddleViT's .pdparams. The preprocessing follows from the program that wrote them.

# {width: (size in timm's names, number of heads)} of the ViTs of Google, DeiT and PaddleViT. Shapes do not show heads.
USUAL = {192: ("tiny", 3), 384: ("small", 6), 768: ("base", 12), 1024: ("large", 16), 1280: ("huge", 16)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def _from_shapes(path: Path) -> tuple[Settings, Settings] | None:
    """Derive the image and model settings from the shapes of Google's or PaddleViT's weights.

    Return None for other files and for unknown models. PaddleViT's DeiTs use ImageNet's mean and standard deviation.
    Its other ViTs and Google's use 0.5.
    """
    kind = format_of(path)
    state = read_state_dict(path) if kind in ("google", "paddle") else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    kernel, hidden = shapes.get("patch_embed.proj.weight", ()), shapes.get("blocks.0.mlp.fc1.weight", ())
    tokens = [shapes[name][1] for name in ("pos_embed", "cls_token", "dist_token") if len(shapes.get(name, ())) == 3]
    if len(kernel) != 4 or len(hidden) != 2 or not tokens:
        return None
    width, channels, patch, _ = kernel
    size = math.isqrt(tokens[0] - sum(tokens[1:])) * patch
    if width not in USUAL:
        return None
    (word, heads), is_distilled = USUAL[width], "dist_token" in shapes
    images = {"DATA.IMAGE_SIZE": size, "DATA.IMAGE_CHANNELS": channels}
    if kind == "google":
        images |= {"DATA.IMAGENET_MEAN": HALF["mean"], "DATA.IMAGENET_STD": HALF["std"]}
    else:
        crop, is_deit = {"crop_pct": 1.0 if size == 384 else 0.875}, is_distilled or "deit" in path.name.lower()
        images = image_settings(crop | ({} if is_deit else HALF)) | images
    if is_distilled:
        return images, model_settings(f"deit_{word}_distilled_patch{patch}_{size}")
    depth = sum(name.endswith(".norm1.weight") for name in shapes)
    return images, _vit_settings(patch, width, depth, heads, hidden[0], "blocks.0.attn.qkv.bias" in shapes)


def _vit_settings(patch: int, width: int, depth: int, heads: int, hidden: int, qkv_bias: bool) -> Settings:
    fields = {"PATCH_SIZE": patch, "EMBED_DIM": width, "DEPTH": depth, "NUM_HEADS": heads, "MLP_RATIO": hidden / width}
    fields |= {"TYPE": "vit", "NAME": "vit", "QKV_BIAS": qkv_bias}
    return {f"MODEL.{name}": value for name, value in fields.items()}


# --- timm's names of weights ---

SHIPPED_FILE = HALFSTEP / "weights/tf_efficientnet_lite0.safetensors"
SHIPPED_NAMES = ("tf_efficientnet_lite0", "tf_efficientnet_lite0.in1k")


def timm_name(source: str) -> str:
    """Return timm's name for weights that may be named as on the hub: hf-hub:timm/NAME or timm/NAME."""
    if re.match(r"(hf-hub|hf_hub):(?!timm/)", source):
        repository = source.partition(":")[2]
        raise ConfigError(
            f"{source}: only timm's own weights are fetched from the hub; download the repository (hf download "
            f"{repository} --local-dir FOLDER) and name the folder: -pretrained FOLDER"
        )
    return re.sub(r"^((hf-hub|hf_hub):)?timm/", "", source)


def shipped_weights(source: str) -> Path | None:
    """Return the file that comes with halfstep with timm's weights of this name, or None."""
    is_shipped = timm_name(source) in SHIPPED_NAMES and SHIPPED_FILE.is_file()
    return SHIPPED_FILE if is_shipped else None


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
    _, height, width = facts["input_size"]
    return image_settings_of(facts) | {"DATA.IMAGE_SIZE": Shape(height, width).size}


def image_settings_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, without the image size, for preprocessing with timm's names, which a run also saves."""
    return {
        "DATA.IMAGE_CHANNELS": facts["input_size"][0],
        "DATA.CROP_PCT": facts["crop_pct"],
        "DATA.CROP_MODE": facts["crop_mode"],
        "DATA.INTERPOLATION": facts["interpolation"],
        "DATA.IMAGENET_MEAN": list(facts["mean"]),
        "DATA.IMAGENET_STD": list(facts["std"]),
        **{f"DATA.{name}": facts[key] for name, key in OF_PIXELS.items() if key in facts},
    }


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
    # The numbers from 1 to 1000 have another order in ImageNet's own files.
    return list(classes) in ([str(number) for number in range(1000)], ImageNetInfo().label_descriptions())


# --- the temperature in a file ---


def calibration_of(state: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the calibration in a checkpoint or export, or {} if it has none for exactly the weights under `key`.

    last.pth also holds the calibration of the best epoch, and best.pth may hold raw weights besides a calibrated EMA.
    """
    with naming_damage(path):
        calibration = state.get(CALIBRATION) or {}
        if calibration.get("weights") != key:
            return {}
        if "epoch" in state and (state["epoch"] + 1, state["step"]) != (calibration["epoch"], calibration["step"]):
            return {}
        if "read.factor" in calibration.get(KNOWN, {}).get("statistics", ()):
            return calibration | {KNOWN: {"reason": "2.3.0 is the last version that reads those of halfstep 2.1"}}
        return calibration
