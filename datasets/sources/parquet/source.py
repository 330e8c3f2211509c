"""`parquet`: the parts of a data set in parquet files, and its classes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.index import note_of_memory
from datasets.sources.labels import check_trained, numbered_classes
from datasets.sources.parquet.files import ENDING, find_files, missing_files, parquet
from datasets.sources.parquet.images import ParquetImages
from datasets.sources.parquet.index import open_parquet_index
from datasets.sources.root import Parts, choose_parts, data_root, expected_layout, own_split
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import format_bytes

EXPECTS = "train-00000-of-00002.parquet ... and validation-*.parquet, also in data/, or train/*.parquet"
LARGE_GROUP = 128 << 20  # bytes: of row groups of this size a process keeps more than other sets need


def read_parquet(config: Config, say: Callable = print) -> tuple[ImageSet | None, ImageSet | None]:
    """Training and validation images, or all images and None."""
    parquet()
    root = data_root(config.DATA, EXPECTS)
    files = {"train": [root]} if root.is_file() else find_files(root)
    parts = choose_parts(files)
    if not parts.train and len(files) == 1:  # one part, whatever it is called: some of it is held out
        parts = Parts(next(iter(files)), None, [])
    train_files, val_files = (files[name] if name else [] for name in (parts.train, parts.val))
    if not train_files and not (config.START.EVAL and val_files):
        raise DataError(f"DATA.DATA_PATH: {root} has no training files; {expected_layout(config.DATA, EXPECTS)}")
    index = open_parquet_index(config, root, [*train_files, *val_files])
    num_train = int(index.column("file_rows")[: len(train_files)].sum())
    parts_of_rows = (range(num_train), range(num_train, len(index.column("label"))))
    for part_files, rows in zip((train_files, val_files), parts_of_rows, strict=True):
        if part_files and not rows:
            raise DataError(f"{part_files[0]}: there are no rows in it; get it again, or remove it")
    train, val = (ParquetImages(config.DATA, index, rows) if rows else None for rows in parts_of_rows)
    image_sets = [each for each in (train, val) if each is not None]
    classes = index.facts["classes"] or numbered_classes(
        config, [each.targets for each in image_sets], [each.name for each in image_sets]
    )
    notes = [*parts.notes(config, root, f"*{ENDING}"), *missing_files([*train_files, *val_files])]
    notes += note_of_memory(index, str(root))
    for image_set in image_sets:
        image_set.classes, image_set.notes = list(classes), tuple(notes)
        image_set.labels_are_numbers = index.facts["classes"] is None
        image_set.classes_are_names = index.facts["are_names"]
        image_set.split = own_split(_title(root, parts.train), _title(root, parts.val))
    if train is not None and val is not None:
        check_trained(train, val, "files")
    if train is not None and not config.START.EVAL:
        image_sets[-1].notes += tuple(_notes_of_groups(train))
    return (None if config.START.EVAL and val is not None else train), val


def _title(root: Path, part: str | None) -> str:
    return str(root) if root.is_file() else f"{root / str(part)}*{ENDING}"


def _notes_of_groups(train: ParquetImages) -> list[str]:
    """Warnings of files that are read slowly, or in an order that mixes badly."""
    notes, remedy = [], "scripts/make_shards.py makes shards that"
    if (largest := train.largest_group) > LARGE_GROUP:
        notes.append(
            f"warning: the largest row group has {format_bytes(largest)} of images, of which each process keeps "
            f"{format_bytes(train.limit)} in memory; {remedy} need none"
        )
    # Of rows in random order only one in as many as there are classes has the label of the row before.
    is_sorted = np.count_nonzero(train.targets[1:] == train.targets[:-1]) > len(train) / 2
    if is_sorted and train.reach < len(train) and len(train.classes) > 2:
        notes.append(
            f"warning: the rows are sorted by class, and an epoch moves them by at most {train.reach:,} places within "
            f"shuffled row groups, so a batch has few classes; {remedy} are better mixed"
        )
    return notes
