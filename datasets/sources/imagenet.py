"""`imagenet2012`: PaddleViT's list files, or class folders."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.sources.folder import read_split_folders, subfolders
from datasets.sources.listing import ROWS_AT_ONCE, Lists, Rows, encoding_of, to_image_sets
from datasets.sources.root import Parts, choose_parts, data_root, expected_layout
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import first_of

TRAIN_LIST, VAL_LIST = "train_list.txt", "val_list.txt"
EXPECTS = (
    f"{TRAIN_LIST} and {VAL_LIST} with a line 'relative/path label' per image, "
    "or train/ and val/ with a folder per class"
)
OFFICIAL_TARS = re.compile(r"ILSVRC2012_img_(train|val)\.tar")


def read_imagenet(config: Config, say: Callable = print) -> tuple[ImageSet | None, ImageSet | None]:
    """Return training images (None with EVAL) and validation images below DATA_PATH."""
    root = data_root(config.DATA, EXPECTS)
    train_file, val_file = root / TRAIN_LIST, root / VAL_LIST
    if not train_file.exists() and not val_file.exists():
        parts = choose_parts(subfolders(root)) if root.is_dir() else Parts(None, None, [])
        if not (parts.train or parts.val):
            _refuse_tars(root)
            _refuse_kaggle(root)
            if (folders := subfolders(root) if root.is_dir() else []) and not config.START.EVAL:
                raise DataError(
                    f"DATA.DATA_PATH: {root} has no train/ and val/, but {first_of(sorted(folders), limit=3)}; if "
                    "these folders are classes, set -dataset imagefolder"
                )
        return read_split_folders(config, root, EXPECTS)
    # Evaluation needs the training list only for its classes.
    files = [val_file] if config.START.EVAL and not train_file.is_file() else [train_file, val_file]
    for file in files:
        if not file.exists():
            raise DataError(f"DATA.DATA_PATH: {root} has no {file.name}; {expected_layout(config.DATA, EXPECTS)}")
        encoding_of(file)  # refuses anything but a regular file
    image_sets = to_image_sets(config, Lists(files, read_list_file, allow_names=False))
    return (None if config.START.EVAL else image_sets[0]), image_sets[-1]


def _refuse_tars(root: Path) -> None:
    """If the folder has ImageNet's official tars, raise DataError with the command that unpacks them."""
    names = [path.name for path in ([root] if root.is_file() else root.iterdir())]
    if any(map(OFFICIAL_TARS.fullmatch, names)):
        raise DataError(
            f"DATA.DATA_PATH: {root} has the official tars of ImageNet, which are not read in place; unpack them with\n"
            f"  python -c \"from torchvision.datasets import ImageNet; [ImageNet('{root}', part) for part in ('train', 'val')]\"\n"
            "The command needs scipy (pip install scipy) and, in the same folder, the development kit "
            "ILSVRC2012_devkit_t12.tar.gz"
        )


def _refuse_kaggle(root: Path) -> None:
    """If this is Kaggle's unpacked archive, raise DataError with the name of the right folder."""
    places = (each / "Data" / "CLS-LOC" for each in (root, root / "ILSVRC"))
    if images := next(filter(Path.is_dir, places), None):
        raise DataError(
            f"DATA.DATA_PATH: {root} is Kaggle's archive of ImageNet; sort its validation images into class folders "
            f"(docs/data.md has the command), then: -dataset imagefolder -data_path {images}"
        )


def read_list_file(file: Path, add: Callable[[Rows], None]) -> list[str]:
    """Read lines 'relative/path label'. Names may contain spaces, so a line is split at its last white space."""
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
            # Make one flat list, because a list for each line would trigger Python's garbage collector many times.
            parts = list(itertools.chain.from_iterable(line.rsplit(maxsplit=1) for line in text))
            if len(parts) < 2 * len(text):
                place, line = next((place, line) for place, line in enumerate(text) if len(line.split(maxsplit=1)) < 2)
                raise DataError(
                    f"{file}, line {numbers[place]}: {line!r} has no label; each line must be 'relative/path label'"
                )
            add(Rows(parts[0::2], parts[1::2], numbers, []))
