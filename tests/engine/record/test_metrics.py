"""The tables of a run go on in the rows that an earlier start of it wrote."""

import errno
import os
from unittest.mock import Mock

import pytest

from engine.record.metrics import StepRows, peak_memory
from engine.record.plot import Plotter
from scripts.maintenance import make_settings_page
from tests.support.configs import CPU


def test_rows_of_a_run_from_before_there_were_these_columns_stay(tmp_path, monkeypatch):
    (tmp_path / "steps.csv").write_text("step,loss\n0,2.5\n20,2.25\n")
    monkeypatch.setattr("engine.record.metrics.STEP_COLUMNS", dict.fromkeys(("step", "loss", "data_pct")))
    rows = StepRows(tmp_path, 20)
    rows.add({"step": 20, "loss": 2.0, "data_pct": 12.5})
    assert (tmp_path / "steps.csv").read_text().endswith("20,2,12.5\n"), "a kill would take the row along"
    rows.add({"step": 40, "loss": 1.5, "data_pct": None})
    rows.close()
    written = (tmp_path / "steps.csv").read_text()
    assert written == "step,loss,data_pct\n0,2.5,\n20,2,12.5\n40,1.5,\n"
    StepRows(tmp_path, 60).close()
    assert (tmp_path / "steps.csv").read_text() == written


def test_a_curve_that_finds_no_room_leaves_the_one_before(tmp_path, monkeypatch):
    Plotter(tmp_path, "before", "top1").draw([{"epoch": 0, "train_loss": 2.0, "eval_top1": 10.0}], [], now=True)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(path.name for path in before) == ["accuracy.png", "loss.png"]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space"):
        Plotter(tmp_path, "after", "top1").draw([{"epoch": 0, "train_loss": 1.0}], [], now=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_table_of_columns_in_the_documentation_is_up_to_date():
    assert make_settings_page.columns_page() == make_settings_page.COLUMNS_PAGE.read_text(encoding="utf-8"), (
        "run python scripts/maintenance/make_settings_page.py"
    )


def test_the_memory_of_a_process_is_in_bytes():
    assert 50 * 2**20 < peak_memory(CPU) < 2**40
