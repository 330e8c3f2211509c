"""The metadata that halfstep stores with weights: keys, types and preprocessing."""

from argparse import Namespace
from dataclasses import fields
from typing import Any

from configs.schema import ONLY_FOR_NATIVE_PIXELS, Data

CALIBRATION = "calibration"  # the key of the temperature, in a checkpoint and in the metadata of an export
KNOWN = "known"  # the key, in a calibration, of the statistics of the validation images for halfstep predict -unknown
_OTHERS = (field.name for field in fields(Data) if field.metadata.get("only") is ONLY_FOR_NATIVE_PIXELS)
# {setting of DATA for images with the values of their files: its name in the preprocessing}
OF_PIXELS = {name: name.lower() for name in ("PIXELS", *_OTHERS)}
LEARNED = "learned"  # the key, for the mean of runs that held out different images, of the data that they have learned
BEST_SCORES = "kept"  # the key, in a checkpoint, of the scores of the images by the weights in best.pth
VERSION_KEY = "halfstep_version"  # the key, in a checkpoint and in an export, of the version that wrote the run
PREFERRED = "preferred"  # an entry of halfstep checkpoints: the key of the better of raw and EMA weights

# Metadata of halfstep's checkpoints and exports with their types. Other programs may use these names differently.
RECORD = {
    "arch": str,
    "class_names": list,
    "split": dict,
    "validation": dict,
    "trained_on": dict,
    "config": dict,
    "data": dict,
    "weights": str,
    "calibration": dict,
    LEARNED: list,
    "timm_config": dict,  # timm's config.json, in the weights that come with halfstep
    "args": dict,  # the command line of timm's and torchvision's training scripts
}


def record_of(content: dict) -> dict:
    plain = {name: vars(value) if isinstance(value, Namespace) else value for name, value in content.items()}
    record = {name: plain[name] for name, kind in RECORD.items() if isinstance(plain.get(name), kind)}
    if not all(isinstance(name, str) for name in record.get("class_names", ())):
        del record["class_names"]
    return record


def preprocessing_of(data: Data) -> dict[str, Any]:
    """Return the preprocessing for evaluation as a dict with timm's names."""
    facts = {
        "mean": list(data.IMAGENET_MEAN),
        "std": list(data.IMAGENET_STD),
        "crop_pct": data.CROP_PCT,
        "crop_mode": data.CROP_MODE,
        "input_size": [data.IMAGE_CHANNELS, *data.shape],
        "interpolation": data.INTERPOLATION,
    }
    others = {key: getattr(data, name) for name, key in OF_PIXELS.items() if getattr(data, name) != getattr(Data, name)}
    return facts | {key: [*value] if isinstance(value, tuple) else value for key, value in others.items()}
