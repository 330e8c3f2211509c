"""Numbers of images in parquet files and in tars."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from datasets.index import ENDING, TEXT, IndexBuilder, index_paths, open_or_build
from datasets.targets.numbers import LARGEST, SEPARATOR, NumberTargets, describe_numbers, parsed, refuse_names, table_of
from datasets.types import ImageSet
from utils.errors import ConfigError, DataError

LABEL = "label"  # the column, or the key in a .json file, without DATA.COLUMNS
MOST_BYTES = 1 << 20  # a larger .json file has no numbers


def with_numbers(images: ImageSet, names: Sequence[str], values: np.ndarray) -> ImageSet:
    """Return images with these numbers: float64 [N, outputs], NaN where one is missing."""
    refuse_names(names)
    facts = {"labels_are_numbers": False, "classes_are_names": True, "classes": list(names)}
    return images.with_facts(targets=np.arange(len(images), dtype=np.int32), meaning=NumberTargets(values), **facts)


def with_notes(sets: Sequence[ImageSet]) -> list[ImageSet]:
    """Return the sets of images with lines for the log about their numbers."""
    return [*sets[:-1], sets[-1].with_facts(notes=(*sets[-1].notes, *describe_numbers(sets[0])))]


# --- parquet ---


def numbers_in_parquet(
    config: Config, files: Sequence[Path], opened: Callable, read_columns: Callable
) -> tuple[list[str], np.ndarray]:
    """Return the names of the outputs, and the numbers of all rows of the files. The functions are those of parquet.py."""
    names, tables = list(config.DATA.COLUMNS[1:]) or [LABEL], []
    for file in files:
        with opened(file) as content:
            schema = content.schema_arrow
        if names == ["*"]:
            names = _numeric_columns(schema)
        if missing := [name for name in names if name not in schema.names]:
            known = ", ".join(schema.names)
            raise DataError(f"{file}: there is no column {missing[0]} among {known}; name the columns in DATA.COLUMNS")
        tables.append(_numbers_of(file, read_columns(file, names), names))
    return names, np.concatenate(tables)


def _numeric_columns(schema: Any) -> list[str]:
    import pyarrow.types as types

    kinds = types.is_integer, types.is_floating, types.is_decimal
    return [each.name for each in schema if any(is_kind(each.type) for is_kind in kinds)]


def _numbers_of(file: Path, table: Any, names: Sequence[str]) -> np.ndarray:
    """Return float64 [rows, columns] for a pyarrow table."""
    import pyarrow

    columns = []
    for name in names:
        column = table.column(name)
        try:
            values = column.cast(pyarrow.float64(), safe=False).to_numpy()
        except pyarrow.ArrowException:
            raise DataError(
                f"{file}: {name} has the type {column.type}, not numbers; name other columns in DATA.COLUMNS"
            ) from None
        if (is_wrong := np.abs(values) > LARGEST).any():
            raise DataError(f"{file}, row {int(is_wrong.argmax())}: {name} is {values[is_wrong][0]:g}; correct it")
        columns.append(values)
    return np.stack(columns, 1)


# --- tars ---


def refuse_tars(config: Config, folder: Any) -> None:
    """Raise ConfigError for tars on a server, and for columns without names. `folder`: a ShardFolder."""
    if folder.drops_tars:
        raise ConfigError("DATA.DATA_PATH: numbers are not read from a server; copy the tars to this machine")
    if config.DATA.COLUMNS[1:] == ("*",):
        raise ConfigError("DATA.COLUMNS: name the keys of the numbers in the .json files of the tars, in place of *")


def numbers_in_tars(
    config: Config, folder: Any, part: str, table: Any, tars: Sequence[Any]
) -> tuple[list[str], np.ndarray]:
    """Return the names of the outputs, and the numbers of all samples. They are stored next to the index of the tars.

    `folder`, `table`, `tars`: see ShardFolder, ShardTable and ShardTar in shards.py.
    """
    names = list(config.DATA.COLUMNS[1:]) or [LABEL]

    def build(builder: IndexBuilder) -> dict:
        for place, tar in enumerate(tars):
            builder.add("number", _read_tar(folder.open(tar), names, table.shard(place).names))
        return {}

    paths = index_paths(config, folder.root / f"{part}.table{ENDING}")
    made_of = {"numbers": names, "tars": [list(tar) for tar in tars]}
    index = open_or_build(paths, {"number": TEXT}, made_of, build, keep_small=True)
    texts = [each.decode() for chunk in index.text("number").chunks() for each in chunk]
    return names, table_of(texts, len(names))


def _read_tar(tar: Any, names: Sequence[str], images: Sequence[bytes]) -> list[bytes]:
    """Return the numbers of each image of a tar as a text of `joined`."""
    members = {_key_of(member.name): member for member in tar.members() if member.size <= MOST_BYTES}
    texts = []
    for image in images:
        key, _ = _key_of(name := image.decode(errors="surrogateescape"))
        # A sample with both files has its numbers in the .json file, and a class in the .cls file.
        ending = next((ending for ending in ("json", "cls") if (key, ending) in members), None)
        if ending is None:
            raise DataError(f"{tar.title}: the sample {name!r} has no numbers (.json or .cls); complete or remove it")
        member = members[key, ending]
        content = tar.read(member.offset, member.size)
        texts.append(_text_of(f"{tar.title}: {member.name}", content, ending, names).encode())
    return texts


def _key_of(name: str) -> tuple[str, str]:
    """Return the name of a sample, and the ending of its file."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending.lower()


def _text_of(where: str, content: bytes, ending: str, names: Sequence[str]) -> str:
    """Return the numbers of a sample as text."""
    try:
        found = json.loads(content) if ending == "json" else content.decode().strip()
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; correct or remove the sample") from None
    if isinstance(found, dict) and not any(name in found for name in names):
        raise DataError(f"{where} has the keys {', '.join(found)}, not {', '.join(names)}; name them in DATA.COLUMNS")
    values = [found.get(name) for name in names] if isinstance(found, dict) else [found]
    cells = ["" if value is None else str(value) for value in values]
    if len(cells) != len(names) or any(parsed(cell) is None for cell in cells):
        raise DataError(f"{where} has {values} for {', '.join(names)}; it must have one number for each (DATA.COLUMNS)")
    return SEPARATOR.join(cells)
