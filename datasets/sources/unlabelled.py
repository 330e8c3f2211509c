"""`-dataset images`: any images without labels, from a folder, a list, tars or parquet files."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from datasets.index import index_paths, open_or_build, stamps_of
from datasets.pixels import pixels_of
from datasets.pixels.decode import IMAGE_ENDINGS
from datasets.sources import data_root, parquet
from datasets.sources import folder as folders
from datasets.sources.listing import Lists, Rows, open_list, to_image_sets
from datasets.sources.shards import ShardFolder, ShardImages, ShardTar, open_table
from datasets.sources.tar import Member, Tar
from datasets.targets.by_label import ByName
from datasets.targets.labels import ROWS_AT_ONCE, OneLabel, ParquetColumns
from datasets.targets.one_class import OneClass
from datasets.types import ImageSet
from utils.errors import DataError

CLASS = "image"  # the class of every image
EXPECTS = "a folder of images (also in subfolders), a .txt file with a path per line, .tar files or .parquet files"
INDEX_FILE = "unlabelled.index"


def read_unlabelled(config: Config, *_: object) -> tuple[ImageSet, None]:
    """Return all images of DATA.DATA_PATH, and None instead of a validation set, which the caller splits off."""
    root = data_root(config.DATA, EXPECTS, reads_files=True, reads_tars=True)
    facts = {"classes": [CLASS], "meaning": OneClass(ByName()), "split": {"training": str(root)}}
    return _choose_reader(root)(config, root).with_facts(**facts), None


def _choose_reader(root: Path) -> Callable[[Config, Path], ImageSet]:
    """Return the reader for a file by its ending, and for a folder by the files in it and in its subfolders.

    If there are images, tars and parquet files next to them are left out.
    """
    readers = {".txt": _read_list, ".tar": _read_tars, parquet.ENDING: _read_parquet}
    if root.is_file():
        if reader := readers.get(root.suffix.lower()):
            return reader
        raise DataError(
            f"DATA.DATA_PATH: {root} is not a list, a tar or a parquet file; -dataset images expects {EXPECTS}"
        )
    if not any(_has_images(folder) for folder in _folders(root)):
        for ending in (".tar", parquet.ENDING):
            if _files(root, ending):
                return readers[ending]
    return _read_folder


def _folders(root: Path) -> list[Path]:
    return [root, *(root / name for name in folders.subfolders(root))]


def _has_images(folder: Path) -> bool:
    with os.scandir(folder) as entries:  # stops at the first image
        return any(entry.name.lower().endswith(tuple(IMAGE_ENDINGS)) for entry in entries)


def _files(root: Path, ending: str) -> list[Path]:
    """Return the file itself, or the sorted files with this ending in the folder and in its subfolders."""
    if root.is_file():
        return [root]
    found = (path for each in _folders(root) for path in each.glob(f"*{ending}"))
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _read_folder(config: Config, root: Path) -> ImageSet:
    return folders.read_class_folders(config, root, [""])  # the folder itself is the only class


def _read_list(config: Config, file: Path) -> ImageSet:
    lists = Lists([file], _read_lines, OneLabel(config), {"unlabelled": True})
    return to_image_sets(config, lists, only_last=True)[0]


def _read_lines(file: Path, add: Callable[[Rows], None]) -> None:
    """Read a list with a path on each line. Paths are relative to the folder of the list."""
    with open_list(file) as lines:
        pairs = ((number, path) for number, line in enumerate(lines, 1) if (path := line.rstrip("\r\n")))
        while some := list(itertools.islice(pairs, ROWS_AT_ONCE)):
            numbers, paths = zip(*some, strict=True)
            add(Rows(list(paths), [CLASS] * len(paths), np.array(numbers), []))


class NoLabels(OneLabel):
    """The labels in parquet files and tars are not read: all images have class 0."""

    def in_tar(self, tar: Tar) -> "NoLabels":
        return self

    def add(self, key: str, ending: str, member: Member) -> None:
        """Read nothing."""

    def of_images(self, images: Mapping[str, Member], endings: Sequence[str]) -> np.ndarray:
        return np.zeros(len(images), np.int64)

    def from_parquet(self, file: Path, columns: ParquetColumns, num_rows: int, read: Callable) -> np.ndarray:
        return np.zeros(num_rows, np.int32)


class UnlabelledShards(ShardFolder):
    """The tars of a folder, or a single tar."""

    def __init__(self, root: Path, reading: OneLabel):
        super().__init__(root.parent if root.is_file() else root, reading)
        self._paths = _files(root, ".tar")

    def tars(self) -> list[ShardTar]:
        return [self._describe(path) for path in self._paths]


def _read_tars(config: Config, root: Path) -> ImageSet:
    shards = UnlabelledShards(root, NoLabels(config))
    part = f"{root.stem}-unlabelled" if root.is_file() else "unlabelled"
    table = open_table(config, shards, part, shards.tars())
    if not len(table):
        raise DataError(f"DATA.DATA_PATH: {root} has no images in its tars; -dataset images expects {EXPECTS}")
    return ShardImages(shards, table, [CLASS], pixels_of(config.DATA), config.DATA.SHUFFLE_BUFFER)


def _read_parquet(config: Config, root: Path) -> ImageSet:
    parquet.pyarrow_parquet()
    files = _files(root, parquet.ENDING)
    made_of = {"files": stamps_of(files), "unlabelled": True}
    beside = root.with_suffix(f".{INDEX_FILE}") if root.is_file() else root / INDEX_FILE
    index = open_or_build(
        index_paths(config, beside),
        parquet.INDEX_COLUMNS | {"label": OneLabel.type},
        made_of,
        lambda builder: parquet.add_rows(builder, files, _image_columns, NoLabels(config)),
    )
    targets = index.column("label")
    if not len(targets):
        raise DataError(f"DATA.DATA_PATH: {root} has no rows; get its files again, or name another folder")
    return parquet.ParquetImages(config.DATA, index, range(len(targets)), targets)


def _image_columns(file: Path, schema: Any, first: Any) -> ParquetColumns:
    """Return the columns of a file's images: `image` or `img`, or else its only column of bytes."""
    found = {field.name: places for field in schema if (places := parquet.bytes_and_path(field)) is not None}
    usual = [name for name in ("image", "img") if name in found]
    if not usual and len(found) != 1:
        columns = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise DataError(
            f"{file}: no column of bytes is named `image` or `img`, and there is not exactly one column of bytes (columns: "
            f"{columns}); rename the column with the images to image"
        )
    return ParquetColumns(*found[usual[0] if usual else next(iter(found))], (), classes=(CLASS,))
