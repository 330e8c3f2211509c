"""Changes label cells of a CSV file and keeps every other byte: separator, encoding, quotes and line ends."""

import codecs
import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from datasets.sources.csv_list import SEPARATORS, Columns
from datasets.sources.listing import encoding_of
from utils.errors import DataError
from utils.files import content_of

MOST_BYTES = 2**31
BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True)
class CsvFile:
    """The rows of a CSV file of a data set, as datasets/sources/csv_list.py reads them."""

    file: Path
    content: bytes
    bom: bytes
    encoding: str
    separator: str
    records: list[str]  # the text of each row with its line end; the first is the header
    places: tuple[int, int]  # the columns of path and label

    @classmethod
    def read(cls, file: Path, config: Config) -> "CsvFile":
        encoding_of(file)  # refuses files that are not text
        content = content_of(file, MOST_BYTES)
        bom = next((bom for bom in BOMS if content.startswith(bom)), b"")
        encoding = BOMS.get(bom, "utf-8")
        text = content[len(bom) :].decode(encoding, errors="surrogateescape" if encoding == "utf-8" else "strict")
        columns = Columns.of(config.DATA, [file])
        for separator in SEPARATORS:
            records = list(_records(text, separator))
            names = [name.strip() for name in _fields(records[0], separator)]
            if {*columns.names} <= {*names}:
                break
        else:
            raise DataError(f"{file}, line 1: the header must name the columns {','.join(columns.names)}")
        # If two columns have the same name, the source reads the last one.
        places = tuple(len(names) - 1 - names[::-1].index(name) for name in (columns.path, columns.of_labels[0]))
        table = cls(file, content, bom, encoding, separator, records, places)
        if table._encode(records) != content:
            raise DataError(f"{file}: the text cannot be written back unchanged; save the file as UTF-8")
        return table

    def _encode(self, records: list[str]) -> bytes:
        errors = "surrogateescape" if self.encoding == "utf-8" else "strict"
        return self.bom + "".join(records).encode(self.encoding, errors=errors)

    def _column(self, place: int) -> list[str]:
        rows = (_fields(record, self.separator) for record in self.records[1:])
        return [row[place].strip() for row in rows if row]

    @property
    def paths(self) -> list[str]:
        return self._column(self.places[0])

    @property
    def labels(self) -> list[str]:
        return self._column(self.places[1])

    def with_labels(self, changes: Mapping[int, str]) -> bytes:
        """Return the content with changed labels. `changes`: {row: label}; rows count from 0 and skip empty lines."""
        records, row = [self.records[0]], -1
        for record in self.records[1:]:
            fields = _fields(record, self.separator)
            row += bool(fields)
            if fields and row in changes:
                changed = self._with_label(record, changes[row])
                spaces = fields[self.places[1]][len(fields[self.places[1]].rstrip(" ")) :]
                fields[self.places[1]] = changes[row] + spaces
                if _fields(changed, self.separator) != fields:
                    raise DataError(
                        f"{self.file}: the quotes of a row are unusual, so its label cannot be changed; correct the row yourself: {record!r}"
                    )
                record = changed
            records.append(record)
        return self._encode(records)

    def _with_label(self, record: str, label: str) -> str:
        start, end = _spans(record, self.separator)[self.places[1]]
        spaces = record[len(record[:end].rstrip(" ")) : end]
        is_quoted = record[start:end].startswith('"')
        needs_quotes = is_quoted or any(each in label for each in (self.separator, '"', "\r", "\n")) or label[:1] == " "
        text = '"' + label.replace('"', '""') + '"' if needs_quotes else label
        return record[:start] + text + spaces + record[end:]


def _records(text: str, separator: str) -> Iterator[str]:
    """Yield the text of each row, which spans several lines if a cell contains a line break."""
    lines: list[str] = []

    def keep() -> Iterator[str]:
        for line in io.StringIO(text, newline=""):
            lines.append(line)
            yield line

    for _ in csv.reader(keep(), delimiter=separator, skipinitialspace=True):
        yield "".join(lines)
        lines.clear()
    if lines:
        yield "".join(lines)


def _fields(record: str, separator: str) -> list[str]:
    """Return the cells of one row; [] for an empty line."""
    return next(csv.reader(io.StringIO(record, newline=""), delimiter=separator, skipinitialspace=True), [])


def _spans(record: str, separator: str) -> list[tuple[int, int]]:
    """Return the start and end of each cell in the text of a row, without leading spaces and the line end."""
    end_of_row = len(record.rstrip("\r\n"))
    spans, place = [], 0
    while True:
        while place < end_of_row and record[place] == " ":
            place += 1
        start, in_quotes = place, place < end_of_row and record[place] == '"'
        place += in_quotes
        while place < end_of_row and (in_quotes or record[place] != separator):
            if record[place] == '"' and in_quotes:
                if record[place + 1 : place + 2] == '"':
                    place += 1
                else:
                    in_quotes = False
            place += 1
        spans.append((start, place))
        if place >= end_of_row:
            return spans
        place += 1
