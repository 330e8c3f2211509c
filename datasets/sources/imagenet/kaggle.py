"""ImageNet as Kaggle's archive unpacks: class folders to train on, and a flat folder of validation images with a table."""

import csv
from pathlib import Path

from configs.schema import Config
from datasets.sources.folder import class_folders, read_class_folders, read_split_folders, subfolders
from datasets.sources.images import FileImages
from datasets.sources.root import own_split
from datasets.transforms.decode import IMAGE_ENDINGS
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import first_of

SOLUTION = "LOC_val_solution.csv"
COLUMNS = ["ImageId", "PredictionString"]


def find_kaggle(root: Path) -> Path | None:
    """The folder ILSVRC of Kaggle's archive: this one, or the one in it."""
    return next((each for each in (root, root / "ILSVRC") if _images(each).is_dir()), None)


def read_kaggle(config: Config, ilsvrc: Path) -> tuple[ImageSet | None, ImageSet]:
    """Data/CLS-LOC/train/n01440764/*.JPEG and Data/CLS-LOC/val/*.JPEG. Classes are numbered by sorted synset."""
    folder = _images(ilsvrc)
    train_folder, val_folder = folder / "train", folder / "val"
    if not val_folder.is_dir() or subfolders(val_folder):  # sorted into class folders by a script
        return read_split_folders(config, folder, "Data/CLS-LOC with train/ and val/")
    solution = find_solution(ilsvrc)
    if solution is None:
        raise DataError(
            f"DATA.DATA_PATH: {val_folder} has images without classes, and {SOLUTION} is neither in {ilsvrc} nor in "
            f"{ilsvrc.parent}; put it there, it is part of Kaggle's archive"
        )
    synsets = read_solution(solution)
    if not train_folder.is_dir() and not config.EVAL:
        raise DataError(
            f"DATA.DATA_PATH: {folder} has no train/ with a folder per class; unpack the archive completely"
        )
    classes = class_folders(train_folder) if train_folder.is_dir() else sorted(set(synsets.values()))
    train = None if config.EVAL else read_class_folders(config, train_folder, classes, classes, deep=False)
    val = _read_val(config, val_folder, solution, synsets, classes)
    val.notes += train.notes if train else ()
    val.split = own_split(train_folder, val_folder)
    return train, val


def _images(ilsvrc: Path) -> Path:
    return ilsvrc / "Data" / "CLS-LOC"


def _read_val(config: Config, folder: Path, solution: Path, synsets: dict[str, str], classes: list[str]) -> FileImages:
    names = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(IMAGE_ENDINGS))
    targets = targets_of(names, folder, solution, synsets, classes)
    image_set = FileImages(folder, names, targets, classes, PixelRules.of(config.DATA))
    image_set.classes_are_names = True
    if missing := sorted(set(synsets) - {Path(name).stem for name in names}):
        image_set.notes = (
            f"warning: {folder}: {len(missing):,} images of {solution} are missing: {first_of(missing)}",
        )
    return image_set


def targets_of(names: list[str], where: Path, solution: Path, synsets: dict[str, str], classes: list[str]) -> list[int]:
    """The class number of each validation image. `where`: the folder or tar with these images."""
    numbers, targets = {name: number for number, name in enumerate(classes)}, []
    for name in names:
        synset = synsets.get(Path(name).stem)
        if synset is None:
            raise DataError(f"{where}: {name} has no line in {solution}; restore that file, or remove the image")
        if synset not in numbers:
            raise DataError(
                f"{solution}: the class of {name}, {synset}, is not among the training images, so it would never be "
                "trained; add them, or correct the line"
            )
        targets.append(numbers[synset])
    return targets


def find_solution(folder: Path) -> Path | None:
    """The table with the classes of the validation images, in this folder or the one above."""
    return next((each / SOLUTION for each in (folder, folder.parent) if (each / SOLUTION).is_file()), None)


def read_solution(file: Path) -> dict[str, str]:
    """The synset of each image. A line is ILSVRC2012_val_00048981,n03995372 85 1 499 272: class and box, for each box."""
    synsets = {}
    with open(file, encoding="utf-8-sig", newline="") as lines:
        try:
            rows = csv.DictReader(lines)
            if rows.fieldnames != COLUMNS:
                raise DataError(
                    f"{file}, line 1: the header must be {','.join(COLUMNS)}; get the file from Kaggle again"
                )
            for row in rows:
                synset = (row[COLUMNS[1]] or "").split()[:1]
                if not (row[COLUMNS[0]] and synset):
                    raise DataError(
                        f"{file}, line {rows.line_num}: an image and its class are expected; correct the line"
                    )
                synsets[row[COLUMNS[0]]] = synset[0]
        except (csv.Error, UnicodeError) as error:
            raise DataError(f"{file}: this is no table ({error}); get the file from Kaggle again") from error
    return synsets
