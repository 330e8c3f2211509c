"""Read numbers as targets from CSV files, parquet files and tars."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from datasets.image_set import Table
from datasets.index import Index, IndexBuilder
from datasets.sources.tar import Member, Tar
from datasets.targets.labels import (
    NAME_COLUMNS,
    USUAL_COLUMNS,
    Cells,
    OneLabel,
    ParquetColumns,
    StoredTargets,
    Targets,
    shortened,
)
from datasets.targets.numbering import ByList
from datasets.targets.numbers import NumberTargets
from utils.errors import ConfigError, DataError

MISSING = ("", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")  # how programs write a number that is missing
LARGEST = 1e30  # larger numbers would overflow in float32
MOST_BYTES = 1 << 20  # a larger .json file has no numbers


class ListedNumbers:
    """The numbers of a list on their way into an index."""

    def __init__(self, builder: IndexBuilder, part: int):
        self._builder, self._name, self._num_columns = builder, f"{part}.number", 1

    def add(self, values: np.ndarray, lines: np.ndarray, folders: np.ndarray) -> None:
        """Add the numbers of the next rows: float64 [rows, outputs]."""
        self._num_columns = values.shape[1]
        self._builder.add(self._name, values)

    def finish(self, folders: list[str]) -> None:
        """Find the numbers of each row, as integers, of which all NaN are equal."""
        self.of_rows = self._builder.column(self._name).view("<i8").reshape(-1, self._num_columns)


class TarNumbers:
    """The numbers of the samples of a tar. A sample has them in its .json file, or otherwise in its .cls file."""

    def __init__(self, tar: Tar, names: Sequence[str]):
        self._tar, self._names = tar, names
        self._members: dict[tuple[str, str], Member] = {}

    def add(self, key: str, ending: str, member: Member) -> None:
        if ending in ("json", "cls") and member.size <= MOST_BYTES:
            self._members[key, ending] = member

    def of_images(self, images: Mapping[str, Member], endings: Sequence[str]) -> np.ndarray:
        """Return float64 [images, outputs]."""
        rows = [self._numbers_of(key, image.name) for key, image in images.items()]
        return np.array(rows, np.float64).reshape(-1, len(self._names))

    def _numbers_of(self, key: str, image: str) -> list[float]:
        ending = next((ending for ending in ("json", "cls") if (key, ending) in self._members), None)
        if ending is None:
            raise DataError(
                f"{self._tar.title}: the sample {image!r} has no numbers (.json or .cls); complete or remove it"
            )
        member, names = self._members[key, ending], self._names
        where, content = f"{self._tar.title}: {member.name}", self._tar.read(member.offset, member.size)
        try:
            content_read = json.loads(content) if ending == "json" else content.decode().strip()
        except (ValueError, RecursionError):
            raise DataError(f"{where} is not JSON; correct or remove the sample") from None
        if isinstance(content_read, dict) and not any(name in content_read for name in names):
            raise DataError(
                f"{where} has the keys {', '.join(content_read)}, not {', '.join(names)}; name them in DATA.COLUMNS"
            )
        values = [content_read.get(name) for name in names] if isinstance(content_read, dict) else [content_read]
        numbers = [parsed("" if value is None else str(value)) for value in values]
        if len(numbers) != len(names) or None in numbers:
            raise DataError(
                f"{where} has {values} for {', '.join(names)}; it must have one number for each (DATA.COLUMNS)"
            )
        return numbers


class NumberColumns(OneLabel):
    """Columns of numbers in tables, or keys of .json files in tars."""

    type = "<f8"
    columns = {"number": "<f8"}  # row by row
    listed = ListedNumbers
    of_csv, of_parquet = {"are_bits": False, "numbers": 1}, {"numbers": 1}  # versions
    suffix = "-numbers"
    if_empty = None

    def __init__(self, config: Config, columns: Sequence[str] = ()):
        super().__init__(config)
        self._names = list(columns or config.DATA.COLUMNS[1:] or USUAL_COLUMNS[1:])
        self.of_tars = {"numbers": self._names}

    def check_header(self, file: Path, names: Sequence[str], used: Sequence[str]) -> None:
        if twice := next((name for name in used if names.count(name) > 1), None):
            raise DataError(
                f"{file}: the header has the column {twice} {names.count(twice)} times; rename or remove one"
            )

    def from_cells(self, cells: Cells) -> np.ndarray:
        return np.stack(
            [self._column(cells, name, column) for name, column in zip(cells.names, cells.columns, strict=True)], 1
        )

    def _column(self, cells: Cells, name: str, column: Sequence[str]) -> np.ndarray:
        """Return a column as float64. Raise DataError for a cell that is not a number."""
        try:  # all at once, because that is much faster
            values = np.array([float(cell or "nan") for cell in column])
            num_present = np.count_nonzero(np.abs(values) <= LARGEST)
            if num_present == len(column) - column.count("") and "_" not in "".join(column):
                return values
        except ValueError:
            pass
        numbers = [parsed(cell) for cell in column]
        if None in numbers:
            row = numbers.index(None)
            remedy = "leave the cell empty if the number is missing, or correct it"
            if parsed(column[row].replace(",", ".", 1)) is not None:
                remedy = f"write a decimal point, not a comma (columns are separated by {cells.separator!r})"
            raise DataError(
                f"{cells.file}, line {cells.lines[row]}: {name} is {shortened(column[row])!r}, which is not a number "
                f"of at most {LARGEST:g}; {remedy}"
            )
        return np.array(numbers)

    def finish(self, builder: IndexBuilder, lists: Sequence[ListedNumbers], files: Sequence[Path]) -> dict:
        return {}

    def from_lists(self, index: Index, files: Sequence[Path]) -> list[Targets]:
        refuse_names(self._names)
        columns = [index.column(f"{part}.number") for part in range(len(files))]
        return [_targets(column.reshape(-1, len(self._names)), self._names) for column in columns]

    def describe(self, train: Table) -> tuple[str, ...]:
        return tuple(train.meaning.describe(train))

    # --- parquet files and tars ---

    def find_in_parquet(
        self, file: Path, schema: Any, first: Any, images: tuple[str, str | None] | None
    ) -> ParquetColumns:
        if images is None:
            name = (self._config.DATA.COLUMNS or USUAL_COLUMNS)[0]
            raise DataError(f"{file}: {name} is no column of images; {NAME_COLUMNS}")
        names = _numeric_columns(first) if self._names == ["*"] else self._names
        if missing := [name for name in names if name not in schema.names]:
            known = ", ".join(schema.names)
            raise DataError(f"{file}: there is no column {missing[0]} among {known}; name the columns in DATA.COLUMNS")
        return ParquetColumns(*images, tuple(names), classes=tuple(names))

    def from_parquet(self, file: Path, columns: ParquetColumns, num_rows: int, read: Callable) -> np.ndarray:
        """Return float64 [rows, outputs]."""
        import pyarrow

        table, numbers = read(file, columns.labels), np.empty((num_rows, len(columns.labels)))
        for place, name in enumerate(columns.labels):
            column = table.column(name)
            try:
                values = column.cast(pyarrow.float64(), safe=False).to_numpy()
            except pyarrow.ArrowException:
                raise DataError(
                    f"{file}: {name} has the type {column.type}, not numbers; name other columns in DATA.COLUMNS"
                ) from None
            if (is_wrong := np.abs(values) > LARGEST).any():
                raise DataError(f"{file}, row {int(is_wrong.argmax())}: {name} is {values[is_wrong][0]:g}; correct it")
            numbers[:, place] = values
        return numbers

    def check_tars(self, is_on_server: bool) -> None:
        if is_on_server:
            raise ConfigError("DATA.DATA_PATH: numbers are not read from a server; copy the tars to this machine")
        if self._names == ["*"]:
            raise ConfigError(
                "DATA.COLUMNS: name the keys of the numbers in the .json files of the tars, in place of *"
            )

    def in_tar(self, tar: Tar) -> TarNumbers:
        return TarNumbers(tar, self._names)

    def stored(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def from_rows(
        self, parts: Sequence[StoredTargets], classes: Callable[[], Sequence[str] | None], numbering: ByList
    ) -> list[Targets]:
        names = list(classes() if self._names == ["*"] else self._names)
        refuse_names(names)
        return [_targets(values, names) for values, _ in parts]


def _targets(values: np.ndarray, names: list[str]) -> Targets:
    """Return the targets of a table of numbers [N, outputs]: the number of each row."""
    return Targets(np.arange(len(values), dtype=np.int32), names, NumberTargets(values))


def parsed(cell: str) -> float | None:
    """Return the number in a cell, NaN if it is missing, or None if the cell is not a number of at most LARGEST."""
    if cell.lower() in MISSING:
        return math.nan
    try:
        value = float(cell) if "_" not in cell else math.inf
    except ValueError:
        return None
    return value if abs(value) <= LARGEST else None


def refuse_names(names: Sequence[str]) -> None:
    """Raise DataError for names that tables of results would mistake for their other columns."""
    taken = {"image", "image_path", *(f"{name}{end}" for name in names for end in ("_predicted", "_low", "_high"))}
    if wrong := [name for name in names if name in taken]:
        raise DataError(
            f"DATA.COLUMNS: {wrong[0]} is also a column of the results; give this column of the data another name"
        )


def _numeric_columns(schema: Any) -> list[str]:
    import pyarrow.types as types

    kinds = types.is_integer, types.is_floating, types.is_decimal
    return [each.name for each in schema if any(is_kind(each.type) for is_kind in kinds)]
