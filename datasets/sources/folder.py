"""`imagefolder`: images in class folders, also for the other data sets with that layout."""

import os
from pathlib import Path

from configs.schema import Config
from datasets.sources.images import FileImages
from datasets.sources.root import data_root, expected_layout
from datasets.transforms.decode import IMAGE_ENDINGS
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageSet
from utils.errors import DataError, did_you_mean

TRAIN_FOLDER, VAL_FOLDERS = "train", ("val", "validation", "test")
EXPECTS = "train/ and val/ (or validation/, test/) with a folder per class, or a folder per class and no split"


def read_image_folder(config: Config) -> tuple[ImageSet | None, ImageSet | None]:
    """`imagefolder`: train/ and val/, or one folder of class folders and None."""
    root = data_root(config.DATA, EXPECTS)
    has_split = (root / TRAIN_FOLDER).is_dir() or find_val_folder(root) is not None
    if has_split:
        return read_split_folders(config, root, EXPECTS)
    classes = class_folders(root)
    return read_class_folders(config, root, classes, classes), None


def read_split_folders(config: Config, root: Path, expects: str) -> tuple[ImageSet | None, ImageSet]:
    """train/ and val/, numbered by the sorted names of the class folders in train/."""
    train_folder, val_folder = root / TRAIN_FOLDER, find_val_folder(root)
    if val_folder is None or not (train_folder.is_dir() or config.EVAL):
        missing = "val" if val_folder is None else "train"
        hint = f"; to hold out a part of train/, use -dataset imagefolder -data_path {train_folder}"
        hint = hint if missing == "val" and train_folder.is_dir() else ""
        raise DataError(
            f"DATA.DATA_PATH: {root} has no folder {missing}/; {expected_layout(config.DATA, expects)}{hint}"
        )
    val_classes = class_folders(val_folder)
    classes = class_folders(train_folder) if train_folder.is_dir() else val_classes
    for name in val_classes:
        if name not in classes:
            raise DataError(
                f"{val_folder / name}: this class has no folder in {train_folder}, so it would never be trained; "
                f"rename it, remove it, or add its training images{did_you_mean(name, classes)}"
            )
    train = None if config.EVAL else read_class_folders(config, train_folder, classes, classes)
    val = read_class_folders(config, val_folder, val_classes, classes)
    val.split = {"rule": "folders", "training": str(train_folder), "validation": str(val_folder)}
    return train, val


def find_val_folder(root: Path) -> Path | None:
    """The folder with the validation images, under any of its usual names."""
    return next((root / name for name in VAL_FOLDERS if (root / name).is_dir()), None)


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders, without hidden ones such as .ipynb_checkpoints."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{folder}: no class folders; images must be in one folder per class")
    return names


def read_class_folders(
    config: Config, folder: Path, names: list[str], classes: list[str], deep: bool = True
) -> FileImages:
    """The images of the class folders `names`, numbered as in `classes`; `deep`: including their subfolders."""
    number = {name: index for index, name in enumerate(classes)}
    paths, targets = [], []
    for name in names:
        found = images_below(folder, name, deep)
        if not found:
            raise DataError(
                f"{folder / name}: no images ({' '.join(IMAGE_ENDINGS)}) in this class folder; add some or remove it"
            )
        paths += found
        targets += [number[name]] * len(found)
    return FileImages(folder, paths, targets, classes, PixelRules.of(config.DATA))


def images_below(root: Path, name: str, deep: bool) -> list[str]:
    """Paths of the images in root/name, relative to root; sorted, because the order of file systems differs."""
    paths = []
    for folder, folders, files in os.walk(root / name, onerror=_raise):
        folders[:] = [each for each in folders if deep and not each.startswith(".")]
        inside = os.path.relpath(folder, root)
        paths += [
            os.path.join(inside, file)
            for file in files
            if file.lower().endswith(IMAGE_ENDINGS) and not file.startswith(".")
        ]
    return sorted(paths)


def _raise(error: OSError) -> None:
    """By default os.walk ignores folders that it cannot read."""
    raise error
