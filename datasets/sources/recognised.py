"""Recognises the kind of data in a folder or file that a command names without -dataset."""

import os
from collections.abc import Iterator
from pathlib import Path

from datasets.pixels.decode import KNOWN_ENDINGS
from datasets.sources.folder import SYSTEM_FOLDERS
from datasets.sources.layout import choose_parts
from datasets.sources.listing import TRAIN_LIST, VAL_LIST
from utils.text import is_url

KIND_OF = dict.fromkeys(KNOWN_ENDINGS, "imagefolder") | {".tar": "shards", ".parquet": "parquet"}
DEPTH = 3  # levels of folders that are searched, as in default/train/0000.parquet


def recognise_data(path: str) -> str:
    """Return the value of DATA.DATASET for a path: by its lists or tables, or by the first data file in its folders.

    Files below subfolders count first, because a tar of the photos may lie next to the class folders.
    """
    if is_url(path):
        return "shards"
    root = Path(path).expanduser()
    if not root.is_dir():
        return {".csv": "csv", ".parquet": "parquet"}.get(root.suffix.lower(), "imagefolder")
    folders, files = listed(root)
    if {TRAIN_LIST, VAL_LIST} <= {*files}:
        return "imagenet2012"
    if choose_parts(Path(name).stem for name in files if name.endswith(".csv")).train:
        return "csv"
    below = (kind for folder in folders for kind in kinds_below(root / folder, DEPTH))
    return next(below, None) or next((kind for kind in kinds_of(files) if kind != "imagefolder"), "imagefolder")


def kinds_below(folder: Path, depth: int) -> Iterator[str]:
    """Yield the kind of each data file in a folder, and then of those in its folders."""
    folders, files = listed(folder)
    yield from kinds_of(files)
    for name in folders if depth > 1 else ():
        yield from kinds_below(folder / name, depth - 1)


def kinds_of(files: list[str]) -> Iterator[str]:
    endings = (os.path.splitext(name)[1].lower() for name in files)
    yield from (KIND_OF[ending] for ending in endings if ending in KIND_OF)


def listed(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders in a folder, and those of its files, without hidden ones.

    A folder that may not be read seems empty here; the data set reports it.
    """
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return [], []
    folders = sorted(entry.name for entry in shown if entry.is_dir() and entry.name not in SYSTEM_FOLDERS)
    return folders, sorted(entry.name for entry in shown if not entry.is_dir())
