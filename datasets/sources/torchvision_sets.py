"""`torchvision/NAME`, `cifar10` and `cifar100`: data sets that torchvision's own classes read and download."""

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ImageOps

from configs.schema import Config
from datasets.image_set import Storage, Table
from datasets.pixels import Pixels
from datasets.pixels.decode import to_array
from datasets.pixels.rules import ImageReadError
from datasets.sources.arrays import ArrayStorage
from datasets.sources.folder import read_caltech
from datasets.sources.images import FileStorage
from datasets.sources.layout import own_split
from datasets.sources.listing import read_imagenet
from utils.commands import page, pip
from utils.errors import ConfigError, DataError, did_you_mean
from utils.torch_internals import LABELS

SHORT_NAMES = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}


def _split(train: str, val: str) -> tuple[dict, dict]:
    return {"split": train}, {"split": val}


# Arguments for the training and the validation images; None: there is one set, and a fraction of it is held out.
SPLITS: dict[str, tuple[dict, dict | None]] = {
    **dict.fromkeys(["DTD", "FGVCAircraft", "Flowers102", "Imagenette", "RenderedSST2"], _split("train", "val")),
    **dict.fromkeys(["Food101", "GTSRB", "STL10", "StanfordCars", "SVHN"], _split("train", "test")),
    # CIFAR's files are pickles; torchvision compares their MD5 sums before it opens them.
    **dict.fromkeys(
        ["CIFAR10", "CIFAR100", "FashionMNIST", "KMNIST", "MNIST", "USPS"], ({"train": True}, {"train": False})
    ),
    **dict.fromkeys(["EuroSAT", "SEMEION", "SUN397"], ({}, None)),
    "Country211": _split("train", "valid"),
    "OxfordIIITPet": _split("trainval", "test"),
}
# Data sets whose layouts halfstep reads itself.
OWN_READERS = ("Caltech101", "Caltech256", "ImageNet")


def read_torchvision(
    config: Config, only_validation: bool, say: Callable[[str], None]
) -> tuple[Table | None, Table | None]:
    """Return training and validation images of the torchvision class in DATA.DATASET. `say` reports a download."""
    dataset = config.DATA.DATASET
    name = SHORT_NAMES.get(dataset, dataset.removeprefix("torchvision/"))
    if name in OWN_READERS:
        return read_imagenet(config, only_validation) if name == "ImageNet" else (read_caltech(config), None)
    if name not in SPLITS:
        known = sorted([*SPLITS, *OWN_READERS])
        raise ConfigError(
            f"DATA.DATASET: {dataset} is not one of the supported data sets ({', '.join(known)})"
            f"{did_you_mean(name, known)}"
        )

    def read_part(part: str, arguments: dict, split: dict) -> Table:
        return _to_table(config, _make(config, name, arguments, say), f"{dataset} {part}".strip(), split)

    train_arguments, val_arguments = SPLITS[name]
    if val_arguments is None:
        return read_part("", train_arguments, {"rule": "position", "training": dataset}), None
    split = own_split(f"{dataset} training", f"{dataset} validation")
    train = None if only_validation else read_part("training", train_arguments, split)
    val = read_part("validation", val_arguments, split)
    if train is not None:
        # If classes are numbers, each part has the classes up to its highest label.
        if train.classes[: len(val.classes)] != val.classes:
            raise DataError(
                f"DATA.DATA_PATH: the training and validation images of {name} in {config.DATA.DATA_PATH} have "
                "different classes; remove the folder to download it again"
            )
        val = replace(val, classes=train.classes)
    return train, val


def _make(config: Config, name: str, arguments: dict, say: Callable[[str], None]) -> Any:
    """Return torchvision's data set, and download it if it is missing or damaged."""
    import torchvision.datasets

    cls, root = getattr(torchvision.datasets, name), Path(config.DATA.DATA_PATH).expanduser()
    if "loader" in inspect.signature(cls).parameters:
        arguments = arguments | {"loader": os.fspath}  # returns the path of an image instead of its pixels
    try:
        try:
            return cls(root, **arguments)
        except (RuntimeError, OSError):
            pass  # not downloaded yet
        say(f"{name}: downloading it to {root}")
        root.mkdir(parents=True, exist_ok=True)
        return cls(root, **arguments, download=True)
    except ImportError as error:
        raise DataError(
            f"DATA.DATASET: {config.DATA.DATASET} needs a package ({error}); {pip('install')} {error.name}"
        ) from error
    except (RuntimeError, OSError, ValueError) as error:
        raise DataError(
            f"DATA.DATA_PATH: {name} is not in {root}, and its download failed ({error}); put its files there, where "
            f"torchvision expects them ({page('docs/data.md')})"
        ) from error


def _to_table(config: Config, dataset: Any, title: str, split: dict) -> Table:
    """Return images in memory or in files if the data set has either, or else images that torchvision reads."""
    if hasattr(dataset, "data"):
        images = np.asarray(dataset.data)
        images = images.transpose(0, 2, 3, 1) if images.ndim == 4 and images.shape[1] == 3 else images
        targets = _targets(dataset)
        storage = ArrayStorage(np.ascontiguousarray(images), title)
        return Table(storage, targets, _classes(dataset, targets), split=split)
    if getattr(dataset, "loader", None) is os.fspath:
        # Sort, because torchvision lists some sets in the order of the file system, which differs between machines.
        rows = sorted(dataset[index] for index in range(len(dataset)))
        targets = np.array([target for _, target in rows], dtype=np.int64)
        root = Path(config.DATA.DATA_PATH).expanduser()
        paths = [os.path.relpath(path, root) for path, _ in rows]
        return Table(FileStorage(root, paths), targets, _classes(dataset, targets), split=split)
    targets = _targets(dataset)
    return Table(TorchvisionStorage(dataset, title), targets, _classes(dataset, targets), split=split)


def _targets(dataset: Any) -> np.ndarray:
    """Return the labels. If torchvision keeps them under none of its usual names, read every image to get them."""
    lists = (getattr(dataset, name, None) for name in LABELS)
    targets = next((each for each in lists if each is not None), None)
    return np.asarray([dataset[index][1] for index in range(len(dataset))] if targets is None else targets, np.int64)


def _classes(dataset: Any, targets: np.ndarray) -> list[str]:
    numbers = range(int(targets.max(initial=-1)) + 1)
    names = getattr(dataset, "classes", numbers)
    return [", ".join(name) if isinstance(name, tuple) else str(name) for name in names]


class TorchvisionStorage(Storage):
    """Pillow images of a torchvision data set that exposes neither file names nor pixels."""

    names_are_numbers = True

    def __init__(self, dataset: Any, title: str):
        self.dataset, self.title = dataset, title

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, row: int) -> str:
        return f"{type(self.dataset).__name__} image {row}"

    def table_name(self, row: int) -> str:
        return f"{self.title} image #{row}"

    def read(self, row: int, pixels: Pixels) -> np.ndarray:
        try:
            image, _ = self.dataset[row]
        except Exception as error:  # Pillow raises many kinds of errors for a broken file
            raise ImageReadError(f"{type(error).__name__}: {error}") from error
        return to_array(ImageOps.exif_transpose(image) if pixels.applies_exif else image, pixels)
