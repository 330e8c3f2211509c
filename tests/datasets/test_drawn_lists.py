"""Drawn lists and CSV files: names and labels are read as they were written, in every form of the file."""

import csv
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from datasets.sources.csv_list import Columns, read_csv_file
from datasets.sources.listing import read_list_file
from tests.support.configs import replaced
from tests.support.file_names import IN_LINES, names
from tests.support.properties import examples

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")
LINE_ENDS = ("\n", "\r\n", "\r")


@st.composite
def written(draw, rows: Sequence[Sequence[str]]) -> bytes:
    """Draw the bytes of a file with these rows: separator, quotes, line ends, encoding and empty lines."""
    separator, quotes = draw(st.sampled_from(",;\t")), draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    line_end, lines = draw(st.sampled_from(LINE_ENDS)), []
    for row in rows:
        text = io.StringIO()
        csv.writer(text, delimiter=separator, quoting=quotes).writerow(row)  # quotes cells with any line end
        lines += [text.getvalue().removesuffix("\r\n"), *draw(st.sampled_from([[], [], [""]]))]
    content = line_end.join(lines) + line_end * draw(st.integers(0, 2))
    return content.encode(draw(st.sampled_from(ENCODINGS)))


def rows_in(content: bytes, config: Config) -> list[tuple[str, ...]]:
    """Return the rows that a run reads from a CSV file: path, label and, with DATA.GROUP_BY, the group."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "list.csv")
        file.write_bytes(content)
        read_csv_file(file, found.append, Columns.of(config.DATA, [file]))
    return [row for rows in found for row in zip(*filter(None, (rows.paths, rows.labels, rows.groups)), strict=True)]


TITLES = st.sampled_from(["note", 'two\n"lines"', "a;b,c"])  # of a further column
HIDDEN = st.sampled_from(["", "", ".", "./", ".hidden/"])


@st.composite
def paths(draw, characters: str | None = None) -> str:
    """Draw a path in a list, where names may be hidden and folders may be called "."."""
    name = names() if characters is None else names(characters)
    return draw(HIDDEN) + "/".join(draw(st.lists(name, min_size=1, max_size=2)))


@given(st.lists(st.tuples(paths(), names(), names(), names()), min_size=1, max_size=5), TITLES, st.data())
@examples(80)
def test_csv_file_is_read_as_written_in_every_form(rows, title, draw):
    header = ("image_path", "target", "person", title)
    order = draw.draw(st.permutations(range(4)))
    content = draw.draw(written([[row[place] for place in order] for row in (header, *rows)]))
    assert rows_in(content, replaced(Config(), DATA={"GROUP_BY": "person"})) == [row[:3] for row in rows]


@given(
    st.lists(st.tuples(paths(IN_LINES), st.integers(0, 999)), min_size=1, max_size=5),
    st.sampled_from(LINE_ENDS),
    st.sampled_from(["utf-8", "utf-8-sig"]),
    st.sampled_from([" ", "\t", "  "]),
    st.sampled_from(["", "\n", " \n\n"]),
)
@examples(60)
def test_list_file_is_read_as_written_with_any_line_end(rows, line_end, encoding, space, end):
    text = line_end.join(f"{path}{space}{label}" for path, label in rows) + end.replace("\n", line_end)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_list.txt")
        file.write_bytes(text.encode(encoding))
        found = []
        read_list_file(file, found.append)
    (of_file,) = found
    assert [*zip(of_file.paths, of_file.labels, strict=True)] == [(path, str(label)) for path, label in rows]
