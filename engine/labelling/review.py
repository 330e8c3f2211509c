"""Writes and reads labels.csv, in which a person confirms corrections, and draws the images in labels.png."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets.sources.csv_list import declared_separator
from datasets.sources.images import on_disk
from datasets.targets.labels import REMEDY, is_utf8
from engine.features.embedder import thumbnail
from engine.labelling.data import DataSet, cell_of
from engine.predict.output import NUM_COLUMNS, THUMBNAIL
from engine.predict.output_paths import PER_SHEET, sheet_paths
from engine.predict.pictures import Tile, contact_sheet, write_picture
from engine.record.saved_files import read_json, write_table
from utils.errors import ConfigError, DataError, did_you_mean, naming_output
from utils.files import content_of, write_text
from utils.text import first_of

TABLE, SHEET, RECORD = "labels.csv", "labels.png", "labels.json"
COLUMNS = ("image", "label", "suggestion", "confidence", "reason", "confirmed")
NEEDED = ("image", "suggestion", "confirmed")
VERSION = 1  # of labels.json
NO = ("", "no", "n", "0", "false", "nein", "non", "nee", "nej", "nie", "não")  # any other word confirms a row
SEPARATORS = ",;\t"  # Excel writes the separator of the user's language
MOST_BYTES = 2**28
MOST_SHEETS = 20


class Row(NamedTuple):
    """A row of labels.csv."""

    image: int  # number of the image
    suggestion: str  # class name; empty if the model has no doubt
    confidence: float | None
    reason: str


class Confirmed(NamedTuple):
    """A row that a person confirmed."""

    name: str  # as in labels.json
    label: str
    suggestion: str


def write_review(folder: Path, rows: Sequence[Row], data: DataSet) -> list[Path]:
    """Write the table, its record and the sheets, and return the paths of the sheets."""
    with naming_output(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RECORD, json.dumps(_record(rows, data), indent=1) + "\n")

        def tiles(part: slice) -> list[Tile]:
            return [_tile(row, data) for row in rows[part]]

        sheets = [*draw_sheets(folder / SHEET, tiles, len(rows))]
        cells = [
            [data.name(row.image), data.label(row.image), row.suggestion, _share(row), row.reason, ""] for row in rows
        ]
        write_table(folder / TABLE, COLUMNS, cells, encoding="utf-8-sig")  # the BOM makes Excel read the file as UTF-8
    return sheets


def refuse_confirmed(table: Path) -> None:
    """Raise ConfigError if new files would replace confirmed rows, or a table or pictures of another program."""
    refuse_other_sheets(table.with_name(SHEET), table)
    if table.exists() and any(row["confirmed"].strip() for row in _rows(table).values()):
        raise ConfigError(
            f"-output: {table} has confirmed rows, which would be lost; apply them first with -apply {table}, or "
            "choose another folder"
        )


def refuse_other_sheets(path: Path, table: Path) -> None:
    """Raise ConfigError if there are sheets but no table. `path`: the path of the first sheet."""
    sheets = [each for each in sheet_paths(path, MOST_SHEETS * PER_SHEET) if each.exists()]
    if sheets and not table.exists():
        raise ConfigError(
            f"-output: {sheets[0]} exists without {table.name}, so it may be yours; choose another folder"
        )


def _share(row: Row) -> str:
    return "" if row.confidence is None else f"{row.confidence:.4f}"


def _record(rows: Sequence[Row], data: DataSet) -> dict[str, Any]:
    names = {row.image: data.name(row.image) for row in rows}
    images = {
        name: {"label": data.label(image), "sha256": digest_of(on_disk(data.root, name))}
        for image, name in names.items()
    }
    return {"version": VERSION, "images": images}


def digest_of(path: str | Path) -> str | None:
    """Return the SHA-256 of a file, or None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def draw_sheets(path: Path, tiles: Callable[[slice], Sequence[Tile]], num_tiles: int) -> Iterator[Path]:
    """Write the sheets, and remove further sheets that an earlier call wrote. Yield the paths of the sheets.

    `path`: the path of the first sheet. `tiles` returns some of the tiles.
    """
    paths = sheet_paths(path, MOST_SHEETS * PER_SHEET)
    needed = paths[: len(sheet_paths(path, num_tiles))]
    for number, sheet in enumerate(needed):
        chosen = tiles(slice(number * PER_SHEET, (number + 1) * PER_SHEET))
        write_picture(contact_sheet(chosen, NUM_COLUMNS, THUMBNAIL), sheet)
        yield sheet
    for sheet in paths[len(needed) :]:
        sheet.unlink(missing_ok=True)


def _tile(row: Row, data: DataSet) -> Tile:
    label = data.label(row.image)
    confidence = "" if row.confidence is None else f" {row.confidence:.2f}"
    title = f"{label} -> {row.suggestion}{confidence}" if row.suggestion else label
    return Tile(thumbnail(*data.find(row.image)), [title, data.name(row.image), row.reason])


def read_confirmed(table: Path, classes: Sequence[str]) -> tuple[list[Confirmed], dict[str, Any]]:
    """Return the confirmed rows of a table, and the content of its labels.json."""
    if not table.is_file():
        raise ConfigError(f"-apply: {table} does not exist; give the {TABLE} that this script wrote")
    path = table.with_name(RECORD)
    record = read_json(path)
    if record.get("version") != VERSION or not isinstance(record.get("images"), dict):
        raise ConfigError(f"-apply: {path} is missing or damaged; put it next to {table}, or find wrong labels again")
    names = {cell_of(name): name for name in record["images"]}
    class_of = {cell_of(name): name for name in classes}
    confirmed: dict[str, Confirmed] = {}
    for number, row in _rows(table).items():
        where, answer = f"-apply: {table}, row {number}", row["confirmed"].strip().lower()
        if answer and not any(sign.isalnum() for sign in answer):
            raise ConfigError(f"{where}: confirmed is {row['confirmed']!r}; write yes, or leave it empty")
        if answer in NO:
            continue
        _refuse_bytes(where, row)
        name = names.get(row["image"])
        if name is None:
            raise ConfigError(f"{where}: {row['image']} is not in {path}; leave the column image as it was")
        suggestion = class_of.get(row["suggestion"], class_of.get(row["suggestion"].strip()))
        if suggestion is None:
            near = did_you_mean(row["suggestion"], classes)
            raise ConfigError(
                f"{where}: suggestion {row['suggestion']!r} is not a class of the data; write the right class of "
                f"{name}, or do not confirm it{near}"
            )
        row_confirmed = Confirmed(name, record["images"][name]["label"], suggestion)
        if confirmed.setdefault(name, row_confirmed) != row_confirmed:
            raise ConfigError(f"{where}: {name} is confirmed with two suggestions; confirm only one of them")
    return list(confirmed.values()), record


def _refuse_bytes(where: str, row: Mapping[str, str]) -> None:
    """Raise ConfigError if a spreadsheet saved the names in a row in another encoding."""
    for column in ("image", "suggestion"):
        if not is_utf8(row[column]):
            raise ConfigError(f"{where}: {column} {row[column]!r} is not UTF-8; {REMEDY}")


def _rows(table: Path) -> dict[int, dict[str, str]]:
    """Return the rows of a table that a spreadsheet may have written: {number in the spreadsheet: {column: cell}}."""
    try:
        content = content_of(table, MOST_BYTES)
        is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = content.decode(*(("utf-16", "replace") if is_utf16 else ("utf-8-sig", "surrogateescape")))
        first, _, rest = text.partition("\n")
        if separator := declared_separator(first):
            text = rest
        else:
            separator = max(SEPARATORS, key=first.count)
        header, *rows = [*csv.reader(io.StringIO(text, newline=""), delimiter=separator)] or [[]]
    except (OSError, csv.Error) as error:
        raise ConfigError(f"{table}: this table cannot be read ({error}); save it as CSV in UTF-8") from None
    names = [name.strip().lower() for name in header]
    if not {*NEEDED} <= {*names}:
        raise ConfigError(f"{table}: not a table of halfstep labels, which has the columns {', '.join(COLUMNS)}")
    return {
        number: dict(zip(names, [*row, *[""] * len(names)], strict=False))
        for number, row in enumerate(rows, start=2)
        if any(row)
    }


def check_unchanged(confirmed: Sequence[Confirmed], root: Path, record: Mapping[str, Any]) -> None:
    """Raise DataError if a confirmed file was removed or changed after labels.csv was written."""
    names = [row.name for row in confirmed]
    changed = [name for name in names if digest_of(on_disk(root, name)) != record["images"][name].get("sha256")]
    if changed:
        raise DataError(
            f"-apply: {len(changed)} of {len(confirmed)} confirmed files were removed or changed after {TABLE} was "
            f"written ({first_of(changed, limit=3)}); find wrong labels again, or do not confirm these rows"
        )
