"""`csv`: files with a column of paths and columns of labels."""

import contextlib
import csv
import itertools
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.image_set import Table
from datasets.sources.layout import choose_parts, data_root, expected_layout
from datasets.sources.listing import ROWS_AT_ONCE, ListRows, Lists, open_list, to_tables
from datasets.targets.kinds import kind_of
from datasets.targets.labels import RawLabels
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
    kind = kind_of(config)
    # The split that is stored next to the index depends on these settings.
    settings = {"columns": columns.names, "group_by": columns.group, "separator": config.DATA.LABEL_SEPARATOR}
    settings |= {"targets": kind.__name__, "are_bits": config.DATA.has_label_columns}
    lists = Lists(files, lambda file: read_csv_file(file, columns), kind, columns.of_labels, settings=settings)
    tables = to_tables(config, lists, only_validation)
    if not (columns.group or only_validation):
        notes = (*notes, *_describe_unused_groups(files[0], columns))
    tables[-1] = replace(tables[-1], notes=(*notes, *tables[-1].notes))
    if len(files) == 1 and not (root.is_dir() and parts.val):
        return tables[0], None
    return tables[0], tables[-1]


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read."""

    config: Config
    path: str
    of_labels: tuple[str, ...]
    group: str | None

    @classmethod
    def of(cls, config: Config, files: list[Path]) -> "Columns":
        path, *of_labels = config.DATA.COLUMNS or USUAL
        group = config.DATA.GROUP_BY
        if of_labels == ["*"]:
            with _opened(files[0], [path]) as (names, _):
                pass
            others = [path] if group is None else [path, group]
            others = [names[place] for place in find_columns(others, names) if place is not None]
            of_labels = [name for name in dict.fromkeys(names) if name and name not in others]
        return cls(config, path, tuple(of_labels), group)

    @property
    def names(self) -> list[str]:
        return [self.path, *self.of_labels, *([self.group] if self.group else [])]


def read_csv_file(file: Path, columns: Columns) -> Iterator[ListRows]:
    """Yield these columns of all rows of a file."""
    kind, num_labels = kind_of(columns.config), len(columns.of_labels)
    with _opened(file, columns.names) as (header, rows):
        counts = Counter(header)
        twice = next((name for name in columns.names if counts[name] > 1), None)
        if twice and kind.has_columns:
            raise DataError(f"{file}: the header has the column {twice} {counts[twice]} times; rename or remove one")
        places = find_columns(columns.names, header)
        while True:
            (paths, *others), lines = _read_values(file, rows, places, len(header))
            if not lines:
                return
            labels, groups = others[:num_labels], [] if columns.group is None else others[-1]
            for name, values in ((columns.path, paths), (columns.group, groups)):
                if "" in values:
                    line = lines[values.index("")]
                    raise DataError(f"{file}, line {line}: {name} is missing; fill it in or remove the row")
            raw = RawLabels(file, columns.of_labels, labels, lines, separator=rows.dialect.delimiter)
            yield ListRows(paths, kind.parse(columns.config, raw), np.array(lines), groups)


def _read_values(file: Path, rows: Any, places: list[int], width: int) -> tuple[list[list[str]], array]:
    """Return the values of the columns at these places, and the line numbers, of the next rows of a csv.reader."""
    # Make one list of texts per column. A tuple per row would trigger Python's garbage collector many times.
    columns, lines = [[] for _ in places], array("Q")
    targets = [(place, column.append) for place, column in zip(places, columns, strict=True)]
    for row in itertools.islice(filter(any, rows), ROWS_AT_ONCE):
        if len(row) > width:
            raise DataError(
                f"{file}, line {rows.line_num}: more values than the header has columns; put values that contain the "
                "separator in quotes"
            )
        num_values = len(row)
        for place, append in targets:
            append(row[place].strip() if place < num_values else "")
        lines.append(rows.line_num)
    return columns, lines


def read_cells(file: Path, columns: Columns) -> Iterator[list[str]]:
    """Yield the cells of the header, and of each row that is not empty."""
    with _opened(file, columns.names) as (header, rows):
        yield header
        yield from filter(any, rows)


def _describe_unused_groups(file: Path, columns: Columns) -> Iterator[str]:
    """Yield a note for each column that probably groups the images and is not read."""
    with _opened(file, columns.names) as (names, _):
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
def _opened(file: Path, columns: list[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield the names in the header of a file, and a csv.reader of the rows after it.

    Raise DataError if the file is not CSV or lacks columns.
    """
    rows = None
    with open_list(file) as lines:
        try:
            declared = declared_separator(lines.readline())
            separator = _find_separator(file, lines, columns, declared)
            rows, header = _read_header(lines, separator, declared)
            yield header, rows
        except csv.Error as error:
            raise DataError(
                f"{file}, line {rows.line_num if rows else 1}: {error}; look for an unclosed quote there, or "
                "correct the line"
            ) from error


def _read_header(lines: TextIO, separator: str, declared: str | None) -> tuple[Any, list[str]]:
    """Return a csv.reader after the header, and the names in it. `declared`: by the first line, which is skipped."""
    lines.seek(0)
    rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    if declared:
        next(rows)
    return rows, [name.strip() for name in next(rows, [])]


def _find_separator(file: Path, lines: TextIO, columns: list[str], declared: str | None) -> str:
    """Return the separator that splits the header so that it has all these columns. `lines`: the open file."""
    most = []
    for separator in declared or SEPARATORS:
        _, names = _read_header(lines, separator, declared)
        if None not in find_columns(columns, names):
            return separator
        most = max(most, names, key=len)
    raise DataError(
        f"{file}, line {2 if declared else 1}: the header must name the columns {','.join(columns)}, but has "
        f"{','.join(most) or 'nothing'}; name the columns of paths and classes with -opts DATA.COLUMNS=[PATHS,CLASSES] "
        "(groups: DATA.GROUP_BY)"
    )
