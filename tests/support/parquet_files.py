"""Parquet files in the format of Hugging Face's library: labelled images of one shade and metadata with class names."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from tests.support.image_sets import png


def rows(numbers: range, num_classes: int = 3) -> dict[str, list]:
    """Return the columns of the rows with these numbers. The shade of each image is its row's number."""
    images = [{"bytes": png(number), "path": f"{number:04d}.png"} for number in numbers]
    return {"image": images, "label": [number % num_classes for number in numbers]}


def write_parquet(
    path: Path, columns: dict[str, list], classes: dict[str, list[str]] | None = None, group: int = 4
) -> Path:
    """Write a Parquet file. `classes`: class names by column; `group`: rows per row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = {name: {"names": names, "_type": "ClassLabel"} for name, names in (classes or {}).items()}
    info = json.dumps({"info": {"features": {"image": {"_type": "Image"}, **features}}})
    table = pyarrow.table(columns)
    if classes:
        table = table.replace_schema_metadata({"huggingface": info})
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    return path


ANIMALS = ["ant", "bee", "cat"]


def make_parquet(root: Path, num_files: int = 2, count: int = 10) -> None:
    """Write data/train-00000-of-00002.parquet ... with shades from 0, and data/validation-... with shades from 200."""
    for number in range(num_files):
        name = f"train-{number:05d}-of-{num_files:05d}.parquet"
        write_parquet(root / "data" / name, rows(range(number * count, (number + 1) * count)), {"label": ANIMALS})
    write_parquet(root / "data" / "validation-00000-of-00001.parquet", rows(range(200, 206)), {"label": ANIMALS})
