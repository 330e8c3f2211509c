"""`imagenet2012`: PaddleViT's list files, or class folders."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.sources.folder import read_split_folders
from datasets.sources.listing import ROWS_AT_ONCE, Lists, Rows, open_list, to_image_sets
from datasets.sources.root import data_root, expected_layout
from datasets.types import ImageSet
from utils.errors import DataError

TRAIN_LIST, VAL_LIST = "train_list.txt", "val_list.txt"
EXPECTS = (
    f"{TRAIN_LIST} and {VAL_LIST} with a line 'relative/path label' per image, "
    "or train/ and val/ with a folder per class"
)


def read_imagenet(config: Config, say: Callable = print) -> tuple[ImageSet | None, ImageSet | None]:
    """Return training images (None with EVAL) and validation images below DATA_PATH."""
    root = data_root(config.DATA, EXPECTS)
    train_file, val_file = root / TRAIN_LIST, root / VAL_LIST
    if not train_file.exists() and not val_file.exists():
        return read_split_folders(config, root, EXPECTS)
    # Evaluation needs the training list only for its classes.
    files = [val_file] if config.START.EVAL and not train_file.is_file() else [train_file, val_file]
    for file in files:
        if not file.exists():
            raise DataError(f"DATA.DATA_PATH: {root} has no {file.name}; {expected_layout(config.DATA, EXPECTS)}")
        with open_list(file):
            pass  # refuses anything but a regular file
    image_sets = to_image_sets(config, Lists(files, read_list_file, allow_names=False))
    return (None if config.START.EVAL else image_sets[0]), image_sets[-1]


def read_list_file(file: Path, add: Callable[[Rows], None]) -> None:
    """Read lines 'relative/path label'. Names may contain spaces, so a line is split at its last white space."""
    with open_list(file) as lines:
        for start in itertools.count(1, ROWS_AT_ONCE):
            text = [line.strip() for line in itertools.islice(lines, ROWS_AT_ONCE)]
            if not text:
                return
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
