"""The data sets: one file for each kind, with a function from the settings to image sets, and a line here."""

import importlib
from collections.abc import Callable

from configs.schema import Config
from datasets.types import ImageSet
from utils.errors import ConfigError, did_you_mean

Read = Callable[[Config, Callable[[str], None]], tuple[ImageSet | None, ImageSet | None]]

TORCHVISION = "torchvision/"
# {DATA.DATASET: file and function}. The function gets the settings, and `say` to report a download; it returns the training
# set (None with EVAL if there is a validation set) and the validation set, or all images and None: then datasets/split.py
# holds some out. The file is imported for its own data set alone.
SOURCES = {
    "imagenet2012": "imagenet.read_imagenet",
    "imagefolder": "folder.read_image_folder",
    "csv": "csv_list.read_csv",
    "shards": "shards.read_shards",
    "parquet": "parquet.read_parquet",
    "caltech101": "caltech.read_caltech",
    "caltech256": "caltech.read_caltech",
    "cifar10": "torchvision_sets.read_torchvision",
    "cifar100": "torchvision_sets.read_torchvision",
    "digits": "digits.read_digits",
    f"{TORCHVISION}NAME": "torchvision_sets.read_torchvision",
    "fractals": "fractals.read_fractals",
    "synthetic": "synthetic.read_synthetic",
}


def find_source(name: str) -> Read:
    """The function that reads a data set."""
    source = SOURCES.get(f"{TORCHVISION}NAME" if name.startswith(TORCHVISION) else name)
    if source is None:
        raise ConfigError(
            f"DATA.DATASET: unknown data set {name!r} (known: {', '.join(SOURCES)}){did_you_mean(name, SOURCES)}"
        )
    module, _, function = source.rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)
