"""`csv`: files with a column of paths and a column of classes."""

import contextlib
import csv
import functools
import itertools
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.image_set import Table
from datasets.sources.layout import choose_parts, data_root, expected_layout
from datasets.sources.listing import Lists, Rows, open_list, to_tables
from datasets.targets.labels import ROWS_AT_ONCE, Cells, OneLabel
from datasets.targets.of_task import reading_of
from utils.errors import DataError

SEPARATORS = ",;\t"
DECLARED = re.compile(r'"?sep=([^\w\s"]|\t)"?\s*', re.IGNORECASE)  # a first line for Excel, such as sep=;
USUAL = ("image_path", "target")
GROUPS = re.compile(r"(group|patient|person|subject|family)([ _-]?id)?", re.IGNORECASE)  # names of columns
EXPECTS = "a .csv file, or a folder with train.csv and val.csv, with the columns image_path,target (DATA.COLUMNS)"


def read_csv(config: Config, only_validation: bool) -> tuple[Table | None, Table | None]:
    """Return the images of train.csv and val.csv, or of one file and None. Labels are class numbers or class names."""
    root = data_root(config.DATA, EXPECTS, reads_files=True)
    files, notes = [root], ()
    if root.is_dir():
        parts = choose_parts(path.stem for path in root.iterdir() if path.suffix == ".csv" and not path.is_dir())
        if not parts.suffice(only_validation):
            raise DataError(f"DATA.DATA_PATH: {root} has no train.csv; {expected_layout(config.DATA, EXPECTS)}")
        notes = parts.notes(only_validation, root, ".csv")
        files = [root / f"{name}.csv" for name in (parts.train, parts.val) if name]
    columns = Columns.of(config, files)
    # The split that is stored next to the index depends on these settings.
    settings = {"columns": columns.names, "group_by": columns.group, "separator": config.DATA.LABEL_SEPARATOR}
    read = functools.partial(read_csv_file, columns=columns)
    lists = Lists(files, read, columns.reading, settings | columns.reading.of_csv)
    tables = to_tables(config, lists, only_validation)
    if not (columns.group or only_validation):
        notes = (*notes, *_describe_unused_groups(files[0], columns))
    tables[-1] = replace(tables[-1], notes=(*notes, *tables[-1].notes))
    if len(files) == 1 and not (root.is_dir() and parts.val):
        return tables[0], None
    return tables[0], tables[-1]


class Columns(NamedTuple):
    """The names of the columns that are read."""

    path: str
    of_labels: tuple[str, ...]
    reading: OneLabel
    group: str | None

    @classmethod
    def of(cls, config: Config, files: list[Path]) -> "Columns":
        path, *of_labels = config.DATA.COLUMNS or USUAL
        group = config.DATA.GROUP_BY
        if of_labels == ["*"]:
            with _opened(files[0], [path]) as rows:
                names = [name.strip() for name in next(rows)]
            others = [path] if group is None else [path, group]
            others = [names[place] for place in find_columns(others, names) if place is not None]
            of_labels = [name for name in dict.fromkeys(names) if name and name not in others]
        return cls(path, tuple(of_labels), reading_of(config, of_labels), group)

    @property
    def names(self) -> list[str]:
        return [self.path, *self.of_labels, *([self.group] if self.group else [])]


def read_csv_file(file: Path, add: Callable[[Rows], None], columns: Columns) -> None:
    """Pass these columns of all rows of a file to `add`."""
    with _opened(file, columns.names) as rows:
        names = [name.strip() for name in next(rows)]
        columns.reading.check_header(file, names, columns.names)
        places = zip(columns.names, find_columns(columns.names, names), strict=True)
        values = _Values(file, columns, [*places], len(names))
        while batch := values.take(rows):
            add(batch)


def read_cells(file: Path, columns: Columns) -> Iterator[list[str]]:
    """Yield the cells of the header, and of each row that is not empty."""
    with _opened(file, columns.names) as rows:
        yield from filter(any, rows)


def _describe_unused_groups(file: Path, columns: Columns) -> Iterator[str]:
    """Yield a note for each column that probably groups the images and is not read."""
    with _opened(file, columns.names) as rows:
        names = [name.strip() for name in next(rows)]
    used = find_columns(columns.names, names)
    for place, name in enumerate(names):
        if place not in used and GROUPS.fullmatch(name):
            yield f"{file}: column {name} is not used; to keep its groups in one part, add -opts DATA.GROUP_BY={name}"


def declared_separator(line: str) -> str | None:
    """Return the separator that a first line such as sep=; declares, or None if the line is a header."""
    match = DECLARED.fullmatch(line)
    return match and match[1]


def find_columns(columns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Return the place of each column in a header with these names, or None.

    Capitals and the Unicode form of a name may differ, unless another name is equal. If a name is repeated, its last
    column is used.
    """
    exact = {name: place for place, name in enumerate(names)}
    plain = {_plain(name): place for place, name in enumerate(names)}
    return [exact.get(column, plain.get(_plain(column))) for column in columns]


def _plain(name: str) -> str:
    return normalize("NFC", name).casefold()


@contextlib.contextmanager
def _opened(file: Path, columns: list[str]) -> Iterator[Any]:
    """Yield a csv.reader of a file, whose first row is the header.

    Raise DataError if it is not CSV or lacks columns.
    """
    rows = None
    with open_list(file) as lines:
        try:
            declared = declared_separator(lines.readline())
            separator = _find_separator(file, lines, columns, declared)
            yield (rows := _reader(lines, separator, declared))
        except csv.Error as error:
            raise DataError(
                f"{file}, line {rows.line_num if rows else 1}: {error}; look for an unclosed quote there, or "
                "correct the line"
            ) from error


def _reader(lines: TextIO, separator: str, declared: str | None) -> Any:
    """Return a csv.reader of the header and the rows, without the line that declares a separator."""
    lines.seek(0)
    rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    if declared:
        next(rows)
    return rows


def _find_separator(file: Path, lines: TextIO, columns: list[str], declared: str | None) -> str:
    """Return the separator that splits the header so that it has all these columns. `lines`: the open file."""
    most = []
    for separator in declared or SEPARATORS:
        names = [value.strip() for value in next(_reader(lines, separator, declared), [])]
        if None not in find_columns(columns, names):
            return separator
        most = max(most, names, key=len)
    raise DataError(
        f"{file}, line {2 if declared else 1}: the header must name the columns {','.join(columns)}, but has "
        f"{','.join(most) or 'nothing'}; name the columns of paths and classes with -opts DATA.COLUMNS=[PATHS,CLASSES] "
        "(groups: DATA.GROUP_BY)"
    )


class _Values(NamedTuple):
    """Extracts path, label and group from rows, and refuses rows with missing or surplus values."""

    file: Path
    columns: Columns
    places: list[tuple[str, int]]  # names and places of the columns: path, labels, group
    width: int

    def take(self, rows: Any) -> Rows | None:
        """Return paths, labels and groups of the next rows of a csv.reader, or None after the last row."""
        # Make one list of strings per column. A tuple per row would trigger Python's garbage collector many times.
        columns, lines = [[] for _ in self.places], array("Q")
        targets = [(column, place, values.append) for (column, place), values in zip(self.places, columns, strict=True)]
        if_empty = dict.fromkeys(self.columns.names, "")
        if_empty |= dict.fromkeys(self.columns.of_labels, self.columns.reading.if_empty)
        for row in itertools.islice(filter(any, rows), ROWS_AT_ONCE):
            if len(row) > self.width:
                raise DataError(
                    f"{self.file}, line {rows.line_num}: more values than the header has columns; put values "
                    "that contain the separator in quotes"
                )
            for column, place, keep in targets:
                value = row[place].strip() if place < len(row) else ""
                if not value and if_empty[column] is not None:
                    raise DataError(
                        f"{self.file}, line {rows.line_num}: {column} is missing; fill it in or remove the row"
                        f"{if_empty[column]}"
                    )
                keep(value)
            lines.append(rows.line_num)
        if not lines:
            return None
        end = 1 + len(self.columns.of_labels)
        cells = Cells(self.file, self.columns.of_labels, columns[1:end], lines, rows.dialect.delimiter)
        labels = self.columns.reading.from_cells(cells)
        return Rows(columns[0], labels, np.array(lines), columns[end] if self.columns.group else [])
