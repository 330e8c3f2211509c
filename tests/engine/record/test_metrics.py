"""The tables and curves of a run go on from what an earlier start of it wrote."""

import errno
import os
from unittest.mock import Mock

import pytest

from engine.record.metrics import StepRows, peak_memory
from engine.record.plot import Plotter, figure_of, plots_of
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


def drawn(rows: list[dict], metric: str = "top1", steps: list[dict] = ()) -> dict:
    """{file: the axes that are drawn into it}"""
    return {plot.file: figure_of(plot, "title").axes[0] for plot in plots_of(rows, steps, metric)}


def epochs(*top1: float, top5: float = 99.0, **more: list[float]) -> list[dict]:
    return [
        {"epoch": number, "train_loss": 1.0, "eval_loss": 2.0 - number, "eval_top1": value, "eval_top5": top5}
        | {name: values[number] for name, values in more.items()}
        for number, value in enumerate(top1)
    ]


def marked(axes) -> tuple[float, float]:
    """Where the best epoch is marked."""
    (line,) = (line for line in axes.lines if line.get_label().startswith("best epoch"))
    return line.get_xdata()[0], line.get_ydata()[0]


@pytest.mark.parametrize("number", [1, 2, 3, 60])
def test_epochs_are_whole_numbers_on_the_axis_and_one_alone_is_seen(number):
    for axes in drawn(epochs(*range(number))).values():
        ticks, (low, high) = axes.get_xticks(), axes.get_xlim()
        assert all(tick == int(tick) for tick in ticks) and any(low <= tick <= high for tick in ticks)
        assert all(line.get_marker() == "." for line in axes.lines[:2]) == (number < 40)


@pytest.mark.parametrize(
    ("rows", "metric", "in_accuracy", "in_loss"),
    [
        (epochs(10, 30, 30, 20), "top1", (3, 30), (3, 0)),  # of two that are equal the one of the smaller loss
        (epochs(10, 30, eval_top1_ema=[40, 20], eval_loss_ema=[1, 1]), "top1", (1, 40), (1, 1)),
        (epochs(10, 30, eval_macro_f1=[50, 40]), "macro_f1", (1, 50), (1, 2)),
        (epochs(30, 10), "loss", (2, 10), (2, 1)),
    ],
)
def test_the_best_epoch_is_marked_in_the_curve_of_what_decides_raw_or_ema(rows, metric, in_accuracy, in_loss):
    found = drawn(rows, metric)
    assert marked(found["accuracy.png"]) == in_accuracy and marked(found["loss.png"]) == in_loss


@pytest.mark.parametrize(("top5", "is_drawn"), [(100.0, False), (99.9, True)])
def test_a_top_5_that_every_image_reaches_is_not_drawn(top5, is_drawn):
    lines = drawn(epochs(10, 30, top5=top5))["accuracy.png"].lines
    assert any("top-5" in line.get_label() for line in lines) is is_drawn


@pytest.mark.parametrize(("scales", "is_drawn"), [((4.0, 4.0, 4.0), False), ((4.0, 2.0, 2.0), True)])
def test_a_loss_scale_that_moves_is_drawn_with_the_skipped_updates(scales, is_drawn):
    steps = [{"step": step, "loss_scale": scale, "skipped": step > 0} for step, scale in enumerate(scales)]
    found = drawn(epochs(10), steps=steps)
    assert ("loss_scale.png" in found) is is_drawn
    if is_drawn:
        assert list(found["loss_scale.png"].lines[1].get_xdata()) == [1]
