"""Drawn lists and CSV files: names and labels are read as they were written, in every form of the file."""

import csv
import io
import re
import tempfile
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from datasets.sources.csv_list import Columns, read_csv_file
from datasets.sources.listing import read_list_file
from tests.support.configs import replaced
from tests.support.file_names import IN_LINES, names
from tests.support.properties import examples
from tests.support.refusals import refused
from utils.errors import DataError

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")
LINE_ENDS = ("\n", "\r\n", "\r")


@st.composite
def written(draw, rows: Sequence[Sequence[str]], encodings: Sequence[str] = ENCODINGS) -> bytes:
    """Draw the bytes of a file with these rows: separator, quotes, line ends, encoding and empty lines."""
    separator, quotes = draw(st.sampled_from(",;\t")), draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    line_end, lines = draw(st.sampled_from(LINE_ENDS)), []
    for row in rows:
        text = io.StringIO()
        csv.writer(text, delimiter=separator, quoting=quotes).writerow(row)  # quotes cells with any line end
        lines += [text.getvalue().removesuffix("\r\n"), *draw(st.sampled_from([[], [], [""]]))]
    content = line_end.join(lines) + line_end * draw(st.integers(0, 2))
    return content.encode(draw(st.sampled_from(encodings)), "surrogateescape")


def line_of(mark: str, content: bytes) -> int:
    """Return the number of the line that contains the mark."""
    text = content.decode("utf-16" if content[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig", "surrogateescape")
    return 1 + len(re.findall("\r\n|\r|\n", text[: text.index(mark)]))


def rows_in(content: bytes, config: Config) -> list[tuple[str, ...]]:
    """Return the rows that a run reads from a CSV file: path, label and, with DATA.GROUP_BY, the group."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "list.csv")
        file.write_bytes(content)
        found = [*read_csv_file(file, Columns.of(config, [file]))]
    return [row for rows in found for row in zip(*filter(None, (rows.paths, rows.labels, rows.groups)), strict=True)]


TITLES = st.sampled_from(["note", 'two\n"lines"', "a;b,c"])  # of a further column
HIDDEN = st.sampled_from(["", "", ".", "./", ".hidden/"])


@st.composite
def paths(draw, characters: str | None = None) -> str:
    """Draw a path in a list, where names may be hidden and folders may be called "."."""
    name = names() if characters is None else names(characters)
    return draw(HIDDEN) + "/".join(draw(st.lists(name, min_size=1, max_size=2)))


@pytest.mark.slow
@given(st.lists(st.tuples(paths(), names(), names(), names()), min_size=1, max_size=5), TITLES, st.data())
@examples(80)
def test_csv_file_is_read_as_written_in_every_form(rows, title, draw):
    header = ("image_path", "target", "person", title)
    order = draw.draw(st.permutations(range(4)))
    content = draw.draw(written([[row[place] for place in order] for row in (header, *rows)]))
    assert rows_in(content, replaced(Config(), DATA={"GROUP_BY": "person"})) == [row[:3] for row in rows]


# {mistake: (cells of path, class and person, number of surplus cells, encodings)}
WRONG_ROWS = {
    "no class": (["MARK", "", "0"], 0, ENCODINGS),
    "no path": ([" ", "MARK", "1"], 0, ENCODINGS),
    "surplus cell": (["MARK", "1", "0"], 1, ENCODINGS),
    "class in another encoding": (["MARK", "b\udce9e", "1"], 0, ENCODINGS[:2]),
    "third value in a column of labels": (["MARK", "0", "2"], 0, ENCODINGS),
}


@pytest.mark.slow
@given(st.sampled_from([*WRONG_ROWS]), st.lists(paths(), max_size=5), st.integers(0, 5), TITLES, st.data())
@examples(80)
def test_error_in_a_csv_file_names_the_line_of_the_row(kind, others, place, title, draw):
    wrong, num_surplus, encodings = WRONG_ROWS[kind]
    rows = [[path, "1", "0"] for path in others]
    rows.insert(place, wrong)
    rows = [[*row, "note"] + ["more"] * num_surplus * (row is wrong) for row in rows]
    content = draw.draw(written([["image_path", "target", "person", title], *rows], encodings))
    has_label_columns = kind.endswith("column of labels")
    columns = {"COLUMNS": ("image_path", "target", "person")} if has_label_columns else {"GROUP_BY": "person"}
    with refused(DataError, f"line {line_of('MARK', content)}:"):
        rows_in(content, replaced(Config(), DATA=columns))


@pytest.mark.slow
@given(
    st.lists(st.tuples(paths(IN_LINES), st.integers(0, 999)), min_size=1, max_size=5),
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=6, max_size=6),
    st.sampled_from(LINE_ENDS),
    st.sampled_from(["utf-8", "utf-8-sig"]),
    st.sampled_from([" ", "\t", "  "]),
    st.integers(0, 5),
)
@examples(60)
def test_list_file_is_read_as_written_with_blank_lines_and_any_line_end(rows, blanks, line_end, encoding, space, place):
    """A line without a label is named by its number."""
    lines, numbers = [], []
    for (path, label), num_blank in zip(rows, blanks, strict=False):
        lines += ["", " "][:num_blank] + [f"{path}{space}{label}"]
        numbers.append(len(lines))
    lines += [""] * blanks[-1]
    place = min(place, len(lines))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_list.txt")
        file.write_bytes(line_end.join(lines).encode(encoding))
        (of_file,) = read_list_file(file)
        file.write_bytes(line_end.join([*lines[:place], "label", *lines[place:]]).encode(encoding))
        with refused(DataError, f"line {place + 1}:"):
            next(read_list_file(file))
    assert [*zip(of_file.paths, of_file.labels, strict=True)] == [(path, str(label)) for path, label in rows]
    assert of_file.lines.tolist() == numbers
