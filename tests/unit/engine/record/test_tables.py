"""Tables with drawn cells are read back unchanged."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.record.saved_files import read_table
from tests.support.properties import examples
from utils.text import csv_text

PIECES = ["a", "é", "=", ",", ";", "'", '"', "\r", "\n", "\r\n", "\t", "\\", " ", "\0", "\x85", "\u2028", "\ufeff", "7"]
CELLS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@pytest.mark.slow
@given(st.lists(st.tuples(CELLS, CELLS), max_size=4), st.booleans())
@examples(100)
def test_written_table_is_read_back_unchanged(tmp_path_factory, rows, is_cut_off):
    text = csv_text([("image", "label"), *rows])
    assert [*map(tuple, csv.reader(io.StringIO(text, newline="")))] == [("image", "label"), *rows]
    file = Path(tmp_path_factory.getbasetemp(), "table.csv")
    file.write_bytes(text.encode() + b"a kill" * is_cut_off)
    assert read_table(file) == [{"image": image, "label": label} for image, label in rows]
