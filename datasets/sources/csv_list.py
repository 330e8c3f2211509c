"""`csv`: files with the columns image_path and target."""

import csv
from collections.abc import Iterator
from pathlib import Path

from configs.schema import Config
from datasets.sources.listing import Listing, to_image_sets
from datasets.sources.root import data_root, expected_layout
from datasets.types import ImageSet
from utils.errors import DataError

COLUMNS = ("image_path", "target")
EXPECTS = "a .csv file, or a folder with train.csv and val.csv, with the columns image_path,target"


def read_csv(config: Config) -> tuple[ImageSet | None, ImageSet | None]:
    """train.csv and val.csv, or one file and None. Targets are class numbers or class names."""
    root = data_root(config.DATA, EXPECTS)
    train_file, val_file = (root, None) if root.is_file() else (root / "train.csv", root / "val.csv")
    if val_file is not None and not val_file.is_file():
        val_file = None
    if not train_file.is_file() and not (config.EVAL and val_file):
        raise DataError(f"DATA.DATA_PATH: {root} has no train.csv; {expected_layout(config.DATA, EXPECTS)}")
    listings = [read_csv_file(file) for file in (train_file, val_file) if file is not None and file.is_file()]
    image_sets = to_image_sets(config, listings, allow_names=True)
    if val_file is None:
        return image_sets[0], None
    return (None if config.EVAL else image_sets[0]), image_sets[-1]


def read_csv_file(file: Path) -> Listing:
    """The rows of a CSV file; other columns are ignored."""
    listing = Listing(file, [], [], [])
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        rows = csv.DictReader(lines, skipinitialspace=True)
        try:
            for path, label in _paths_and_labels(file, rows):
                listing.paths.append(path)
                listing.labels.append(label)
                listing.lines.append(rows.line_num)
        except csv.Error as error:
            raise DataError(
                f"{file}, line {rows.reader.line_num}: {error}; look for an unclosed quote there, or correct the line"
            ) from error
    return listing


def _paths_and_labels(file: Path, rows: csv.DictReader) -> Iterator[tuple[str, str]]:
    """Path and label of each row, which must have both."""
    header = [name.strip() for name in rows.fieldnames or []]
    if not set(COLUMNS) <= set(header):
        found = ",".join(header) or "nothing"
        raise DataError(f"{file}, line 1: the header must name the columns {','.join(COLUMNS)}, but has {found}")
    rows.fieldnames = header
    for row in rows:
        path, label = ((row[column] or "").strip() for column in COLUMNS)
        for column, value in zip(COLUMNS, (path, label), strict=True):
            if not value:
                raise DataError(f"{file}, line {rows.line_num}: {column} is missing; fill it in or remove the row")
        yield path, label
