"""Draws CSV files in the forms in which spreadsheets and scripts write the same rows, and reads them as a run does."""

import csv
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from configs.schema import Config
from datasets.sources.csv_list import Columns, read_csv_file

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
