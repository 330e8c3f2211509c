"""`imagenet2012`: PaddleViT's list files, class folders, or Kaggle's folders with its table of validation classes."""

import csv
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.sources.folder import class_folders, read_class_folders, read_split_folders, subfolders
from datasets.sources.images import FileImages
from datasets.sources.listing import ROWS_AT_ONCE, Lists, Rows, encoding_of, to_image_sets
from datasets.sources.root import Parts, choose_parts, data_root, expected_layout, own_split
from datasets.transforms.decode import IMAGE_ENDINGS, PixelRules
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import first_of

TRAIN_LIST, VAL_LIST = "train_list.txt", "val_list.txt"
EXPECTS = (
    f"{TRAIN_LIST} and {VAL_LIST} with a line 'relative/path label' per image, "
    "or train/ and val/ with a folder per class, or Kaggle's ILSVRC"
)
SOLUTION = "LOC_val_solution.csv"
COLUMNS = ["ImageId", "PredictionString"]
OFFICIAL_TARS = re.compile(r"ILSVRC2012_img_(train|val)\.tar")


def read_imagenet(config: Config, say: Callable = print) -> tuple[ImageSet | None, ImageSet | None]:
    """Training and validation images below DATA_PATH, or all images and None."""
    root = data_root(config.DATA, EXPECTS)
    train_file, val_file = root / TRAIN_LIST, root / VAL_LIST
    if not train_file.exists() and not val_file.exists():
        parts = choose_parts(subfolders(root)) if root.is_dir() else Parts(None, None, [])
        if not (parts.train or parts.val):
            if ilsvrc := _find_kaggle(root):
                return _read_kaggle(config, ilsvrc)
            _refuse_tars(root)
            if (folders := subfolders(root) if root.is_dir() else []) and not config.START.EVAL:
                raise DataError(
                    f"DATA.DATA_PATH: {root} has no train/ and val/, but {first_of(sorted(folders), limit=3)}; if each is a "
                    "class: -dataset imagefolder"
                )
        return read_split_folders(config, root, EXPECTS)
    # Evaluation needs the training list only for its classes.
    files = [val_file] if config.START.EVAL and not train_file.is_file() else [train_file, val_file]
    for file in files:
        if not file.exists():
            raise DataError(f"DATA.DATA_PATH: {root} has no {file.name}; {expected_layout(config.DATA, EXPECTS)}")
        encoding_of(file)  # which refuses what is no file
    image_sets = to_image_sets(config, Lists(files, read_list_file, allow_names=False))
    return (None if config.START.EVAL else image_sets[0]), image_sets[-1]


def _refuse_tars(root: Path) -> None:
    """DataError with the command that unpacks ImageNet's tars, if they are all that there is."""
    names = [path.name for path in ([root] if root.is_file() else root.iterdir())]
    if any(map(OFFICIAL_TARS.fullmatch, names)):
        raise DataError(
            f"DATA.DATA_PATH: {root} has the official tars of ImageNet, which are not read in place; unpack them with\n"
            f"  python -c \"from torchvision.datasets import ImageNet; [ImageNet('{root}', part) for part in ('train', 'val')]\"\n"
            "which needs the development kit ILSVRC2012_devkit_t12.tar.gz there, and pip install scipy"
        )


def read_list_file(file: Path, add: Callable[[Rows], None]) -> list[str]:
    """Lines 'relative/path label'. Names may contain spaces, so a line is split at its last white space."""
    if encoding_of(file) != "utf-8-sig":
        raise DataError(f"{file}: this is UTF-16; save it as UTF-8")
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
        for start in itertools.count(1, ROWS_AT_ONCE):
            text = [line.strip() for line in itertools.islice(lines, ROWS_AT_ONCE)]
            if not text:
                return []
            numbers = np.arange(start, start + len(text))
            if "" in text:
                numbers, text = numbers[[bool(line) for line in text]], list(filter(None, text))
            # One list of strings: a list for each line would set off Python's garbage collector again and again.
            parts = list(itertools.chain.from_iterable(line.rsplit(maxsplit=1) for line in text))
            if len(parts) < 2 * len(text):
                place, line = next((place, line) for place, line in enumerate(text) if len(line.split(maxsplit=1)) < 2)
                raise DataError(
                    f"{file}, line {numbers[place]}: {line!r} has no label; a line is 'relative/path label'"
                )
            add(Rows(parts[0::2], parts[1::2], numbers, []))


# --- Kaggle's archive as it unpacks: class folders to train on, a flat folder of validation images, a table of these ---


def _find_kaggle(root: Path) -> Path | None:
    """The folder ILSVRC of Kaggle's archive: this one, or the one in it."""
    return next((each for each in (root, root / "ILSVRC") if _images(each).is_dir()), None)


def _images(ilsvrc: Path) -> Path:
    return ilsvrc / "Data" / "CLS-LOC"


def _read_kaggle(config: Config, ilsvrc: Path) -> tuple[ImageSet | None, ImageSet]:
    """Data/CLS-LOC/train/n01440764/*.JPEG and Data/CLS-LOC/val/*.JPEG. Classes are numbered by sorted synset."""
    folder = _images(ilsvrc)
    train_folder, val_folder = folder / "train", folder / "val"
    if not val_folder.is_dir() or subfolders(val_folder):  # sorted into class folders by a script
        return read_split_folders(config, folder, "Data/CLS-LOC with train/ and val/")
    places = [each / SOLUTION for each in (ilsvrc, ilsvrc.parent)]
    solution = next((each for each in places if each.is_file()), None)
    if solution is None:
        raise DataError(
            f"DATA.DATA_PATH: {val_folder} has images without classes, and {SOLUTION} is neither in {ilsvrc} nor in "
            f"{ilsvrc.parent}; put it there, it is part of Kaggle's archive"
        )
    synsets = _read_solution(solution)
    if not train_folder.is_dir() and not config.START.EVAL:
        raise DataError(
            f"DATA.DATA_PATH: {folder} has no train/ with a folder per class; unpack the archive completely"
        )
    classes = class_folders(train_folder) if train_folder.is_dir() else sorted(set(synsets.values()))
    train = None if config.START.EVAL else read_class_folders(config, train_folder, classes, classes, deep=False)
    val = _read_val(config, val_folder, solution, synsets, classes)
    val.notes += train.notes if train else ()
    val.split = own_split(train_folder, val_folder)
    return train, val


def _read_val(config: Config, folder: Path, solution: Path, synsets: dict[str, str], classes: list[str]) -> FileImages:
    names = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(IMAGE_ENDINGS))
    numbers, targets = {name: number for number, name in enumerate(classes)}, []
    for name in names:
        synset = synsets.get(Path(name).stem)
        if synset is None:
            raise DataError(f"{folder}: {name} has no line in {solution}; restore that file, or remove the image")
        if synset not in numbers:
            raise DataError(
                f"{solution}: the class of {name}, {synset}, is not among the training images, so it would never be "
                "trained; add them, or correct the line"
            )
        targets.append(numbers[synset])
    image_set = FileImages(folder, names, targets, classes, PixelRules.of(config.DATA))
    image_set.classes_are_names = True
    if missing := sorted(set(synsets) - {Path(name).stem for name in names}):
        image_set.notes = (
            f"warning: {folder}: {len(missing):,} images of {solution} are missing: {first_of(missing)}",
        )
    return image_set


def _read_solution(file: Path) -> dict[str, str]:
    """The synset of each image. A line is ILSVRC2012_val_00048981,n03995372 85 1 499 272: class and box, for each box."""
    synsets = {}
    with open(file, encoding=encoding_of(file), newline="") as lines:
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
