"""Tables with drawn cells are read back unchanged, and rows of earlier starts of a run are kept."""

import csv
import io
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.record.columns import STEP_COLUMNS
from engine.record.metrics import EpochRows, StepRows
from engine.record.saved_files import read_table
from tests.support.properties import examples
from utils.text import csv_text

PIECES = ["a", "é", "=", ",", ";", "'", '"', "\r", "\n", "\r\n", "\t", "\\", " ", "\0", "\x85", "\u2028", "\ufeff", "7"]
CELLS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=4), st.booleans())
@examples(100)
def test_written_table_is_read_back_unchanged(tmp_path_factory, rows, is_cut_off):
    text = csv_text([("image", "label"), *rows])
    assert [*map(tuple, csv.reader(io.StringIO(text, newline="")))] == [("image", "label"), *rows]
    file = Path(tmp_path_factory.getbasetemp(), "table.csv")
    file.write_bytes(text.encode() + b"a kill" * is_cut_off)
    assert read_table(file) == [{"image": image, "label": label} for image, label in rows]


VALUES = st.none() | st.floats(-1e9, 1e9).map(lambda value: float(f"{value:.10g}"))


@given(st.lists(st.dictionaries(st.sampled_from(["loss", "lr", "num_updates"]), VALUES), max_size=6), st.data())
@examples(60)
def test_restarted_run_keeps_the_rows_before_its_first_step(tmp_path_factory, drawn, data):
    """A step has a row every 20 updates, and an epoch may lack any column. A kill can cut off the last line."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    first, has_budget = data.draw(st.integers(0, 120)), data.draw(st.booleans())
    steps = [{"step": 20 * number, "epoch": number, **row} for number, row in enumerate(drawn)]
    written = StepRows(folder, 0, has_budget)
    for row in steps:
        written.add(row)
    written.close()
    with open(folder / "steps.csv", "a") as file:
        file.write("990,1"[: data.draw(st.integers(0, 5))])
    again = StepRows(folder, first, has_budget)
    again.close()
    kept = {name for name in STEP_COLUMNS if has_budget or name != "num_updates"}
    wanted = [
        {name: row.get(name) if name in kept else None for name in STEP_COLUMNS} for row in steps if row["step"] < first
    ]
    assert again.rows == wanted and {*read_table(folder / "steps.csv")[0]} == kept if wanted else not again.rows
    of_epochs = EpochRows(folder, 0)
    for number, row in enumerate(drawn):
        of_epochs.add({"epoch": number, **row})
    again = EpochRows(folder, first // 20)
    again.add({"epoch": 99})
    rows = [{"epoch": number, **row} for number, row in enumerate(drawn[: first // 20])]
    assert again.rows == [*rows, {"epoch": 99}] and again.is_written
    table = [{name: float(cell) for name, cell in row.items() if cell} for row in read_table(folder / "metrics.csv")]
    assert table == [{name: value for name, value in row.items() if value is not None} for row in again.rows]
