"""The tables of a run go on in the rows that an earlier start of it wrote."""

from engine.report.metrics import StepRows


def test_rows_of_a_run_from_before_there_were_these_columns_stay(tmp_path):
    (tmp_path / "steps.csv").write_text("step,loss\n0,2.5\n20,2.25\n")
    rows = StepRows(tmp_path, 20, ("step", "loss", "data_pct"))
    rows.add({"step": 20, "loss": 2.0, "data_pct": 12.5})
    rows.add({"step": 40, "loss": 1.5, "data_pct": None})
    rows.close()
    written = (tmp_path / "steps.csv").read_text()
    assert written == "step,loss,data_pct\n0,2.5,\n20,2,12.5\n40,1.5,\n"
    StepRows(tmp_path, 60, ("step", "loss", "data_pct")).close()
    assert (tmp_path / "steps.csv").read_text() == written
