"""`imagenet2012`: PaddleViT's list files, or class folders where there are none."""

from pathlib import Path

from configs.schema import Config
from datasets.sources.folder import read_split_folders
from datasets.sources.listing import Listing, to_image_sets
from datasets.sources.root import data_root, expected_layout
from datasets.types import ImageSet
from utils.errors import DataError

TRAIN_LIST, VAL_LIST = "train_list.txt", "val_list.txt"
EXPECTS = (
    f"{TRAIN_LIST} and {VAL_LIST} with a line 'relative/path label' per image, "
    "or train/ and val/ with a folder per class"
)


def read_imagenet(config: Config) -> tuple[ImageSet | None, ImageSet]:
    """Training and validation images below DATA_PATH."""
    root = data_root(config.DATA, EXPECTS)
    train_file, val_file = root / TRAIN_LIST, root / VAL_LIST
    if not train_file.is_file() and not val_file.is_file():
        return read_split_folders(config, root, EXPECTS)
    # Evaluation needs the training list only for its classes.
    files = [val_file] if config.EVAL and not train_file.is_file() else [train_file, val_file]
    for file in files:
        if not file.is_file():
            raise DataError(f"DATA.DATA_PATH: {root} has no {file.name}; {expected_layout(config.DATA, EXPECTS)}")
    listings = [read_list_file(file) for file in files]
    image_sets = to_image_sets(config, listings, allow_names=False)
    return (None if config.EVAL else image_sets[0]), image_sets[-1]


def read_list_file(file: Path) -> Listing:
    """Lines 'relative/path label'. Names may contain spaces, so a line is split at its last white space."""
    listing = Listing(file)
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            parts = line.strip().rsplit(maxsplit=1)
            if len(parts) < 2:
                raise DataError(f"{file}, line {number}: {parts[0]!r} has no label; a line is 'relative/path label'")
            listing.paths.append(parts[0])
            listing.labels.append(parts[1])
            listing.lines.append(number)
    return listing
