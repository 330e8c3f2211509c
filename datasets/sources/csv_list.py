"""`csv`: files with a column of paths and a column of classes."""

import contextlib
import csv
import functools
import itertools
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.labels import OneLabel, shortened
from datasets.sources import choose_parts, data_root, expected_layout
from datasets.sources.listing import ROWS_AT_ONCE, Lists, Rows, open_list, to_image_sets
from datasets.types import ImageSet
from utils.errors import DataError

SEPARATORS = ",;\t"
DECLARED = re.compile(r'"?sep=([^\w\s"]|\t)"?\s*', re.IGNORECASE)  # a first line for Excel, such as sep=;
USUAL = ("image_path", "target")
GROUPS = re.compile(r"(group|patient|person|subject|family)([ _-]?id)?", re.IGNORECASE)  # names of columns
BITS = {"0": "0", "0.0": "0", "false": "0", "1": "1", "1.0": "1", "true": "1"}
REMEDY = "save the file as UTF-8, in Excel as 'CSV UTF-8'"
EXPECTS = "a .csv file, or a folder with train.csv and val.csv, with the columns image_path,target (DATA.COLUMNS)"


def read_csv(config: Config, only_validation: bool, *_: object) -> tuple[ImageSet | None, ImageSet | None]:
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
    settings = {"columns": columns.names, "group_by": columns.group, "are_bits": columns.are_bits}
    settings["separator"] = config.DATA.LABEL_SEPARATOR
    kind = OneLabel(allow_names=True)
    if columns.are_numbers:
        from datasets.numbers import NumberColumns

        kind, settings["are_numbers"] = NumberColumns(columns.of_labels), True
    elif config.DATA.has_several_labels:
        from datasets.label_sets import SeveralLabels

        kind = SeveralLabels(columns.of_labels if columns.are_bits else ())
    read = functools.partial(read_csv_file, columns=columns)
    image_sets = to_image_sets(config, Lists(files, read, kind, settings), only_validation)
    if not (columns.group or only_validation):
        notes = (*notes, *_describe_unused_groups(files[0], columns))
    image_sets[-1] = image_sets[-1].with_facts(notes=(*notes, *image_sets[-1].notes))
    if len(files) == 1 and not (root.is_dir() and parts.val):
        return image_sets[0], None
    return image_sets[0], image_sets[-1]


class Columns(NamedTuple):
    """The names of the columns that are read."""

    path: str
    of_labels: tuple[str, ...]  # one column of classes, or any number of columns of 0 and 1, or of numbers
    are_bits: bool  # the labels are columns of 0 and 1
    are_numbers: bool  # the labels are columns of numbers to predict
    may_be_empty: bool  # the labels may be empty, for images without a label
    group: str | None

    @classmethod
    def of(cls, config: Config, files: list[Path]) -> "Columns":
        data, are_numbers = config.DATA, config.TRAIN.OBJECTIVE == "numbers"
        path, *of_labels = data.COLUMNS or USUAL
        group = data.GROUP_BY
        if of_labels == ["*"]:
            with _opened(files[0], [path]) as rows:
                names = [name.strip() for name in next(rows)]
            others = [path] if group is None else [path, group]
            others = [names[place] for place in find_columns(others, names) if place is not None]
            of_labels = [name for name in dict.fromkeys(names) if name and name not in others]
        are_bits = data.has_label_columns and not are_numbers
        may_be_empty = data.LABEL_SEPARATOR is not None or are_numbers
        return cls(path, tuple(of_labels), are_bits, are_numbers, may_be_empty, group)

    @property
    def names(self) -> list[str]:
        return [self.path, *self.of_labels, *([self.group] if self.group else [])]


def read_csv_file(file: Path, add: Callable[[Rows], None], columns: Columns) -> None:
    """Pass these columns of all rows of a file to `add`."""
    with _opened(file, columns.names) as rows:
        names = [name.strip() for name in next(rows)]
        if columns.are_numbers and (twice := next((name for name in columns.names if names.count(name) > 1), None)):
            raise DataError(
                f"{file}: the header has the column {twice} {names.count(twice)} times; rename or remove one"
            )
        places = zip(columns.names, find_columns(columns.names, names), strict=True)
        values = _Values(file, columns, [*places], len(names))
        while found := values.take(rows):
            add(found)


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
    found = DECLARED.fullmatch(line)
    return found and found[1]


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


def is_utf8(text: str) -> bool:
    """Return whether a text that was read with surrogateescape is UTF-8, so that it has no surrogates for single bytes."""
    return text.isprintable() or not any("\udc80" <= each <= "\udcff" for each in text)


@contextlib.contextmanager
def _opened(file: Path, columns: list[str]) -> Iterator[Any]:
    """Yield a csv.reader of a file, whose first row is the header. Raise DataError if it is not CSV or lacks columns."""
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
        f"{','.join(most) or 'nothing'}; name the columns of paths and classes with -opts DATA.COLUMNS=[PATHS,CLASSES] (groups: DATA.GROUP_BY)"
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
        optional = self.columns.of_labels if self.columns.may_be_empty else ()
        for row in itertools.islice(filter(any, rows), ROWS_AT_ONCE):
            if len(row) > self.width:
                raise DataError(
                    f"{self.file}, line {rows.line_num}: more values than the header has columns; put values "
                    "that contain the separator in quotes"
                )
            for column, place, keep in targets:
                value = row[place].strip() if place < len(row) else ""
                if not value and column not in optional:
                    is_label = column in self.columns.of_labels and not self.columns.are_bits
                    raise DataError(
                        f"{self.file}, line {rows.line_num}: {column} is missing; fill it in or remove the row"
                        + ", or if images have several labels or none, name their separator: "
                        "-opts DATA.LABEL_SEPARATOR='|'" * is_label
                    )
                keep(value)
            lines.append(rows.line_num)
        if not lines:
            return None
        end = 1 + len(self.columns.of_labels)
        labels = columns[1]
        if self.columns.are_numbers:
            from datasets.numbers import joined

            labels = joined(self.file, self.columns.of_labels, columns[1:end], lines, rows.dialect.delimiter)
        elif self.columns.are_bits:
            labels = self._as_bits(columns[1:end], lines)
        self._refuse_bytes(labels, lines)
        return Rows(columns[0], labels, np.array(lines), columns[end] if self.columns.group else [])

    def _as_bits(self, columns: list[list[str]], lines: array) -> list[str]:
        """Return the columns of 0 and 1 as one string for each row, such as 0101."""
        bits = [[BITS.get(value.lower(), "") for value in values] for values in columns]
        wrong = [(found.index(""), place) for place, found in enumerate(bits) if "" in found]
        for row, place in sorted(wrong)[:1]:
            raise DataError(
                f"{self.file}, line {lines[row]}: {self.columns.of_labels[place]} is "
                f"{shortened(columns[place][row])!r}; a column of labels (DATA.COLUMNS) has 1 for images with this "
                "label and 0 for the others (or true and false)"
            )
        return ["".join(each) for each in zip(*bits, strict=True)]

    def _refuse_bytes(self, labels: list[str], lines: array) -> None:
        """Raise DataError if a label is not UTF-8 (has surrogates). Paths may have surrogates, as file names may."""
        if "".join(labels).isprintable():
            return
        for label, line in zip(labels, lines, strict=True):
            if not is_utf8(label):
                raise DataError(f"{self.file}, line {line}: {self.places[1][0]} {label!r} is not UTF-8; {REMEDY}")
