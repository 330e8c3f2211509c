"""The lines of epochs on a terminal: which columns, what is marked, what is left out."""

from types import SimpleNamespace

import pytest

from engine.evaluation.scores import Best, Scores
from engine.record import console, metrics
from engine.record.console import LINES_BELOW_A_HEAD, EpochTable
from engine.record.metrics import Epoch, epoch_row
from engine.train.counters import EpochResult, Report
from tests.support.configs import CPU, small_config
from utils.distributed import Process

REPORT = Report(1, 0, 0.1, 0.5, 0.25, 0.9, 0, 0, 1.0, 1.0, 1.0)
SCORES = Scores(0.5, 90.0, 99.0, 100, 0)


def result(report=REPORT, **scores: Scores) -> EpochResult:
    named = {"_ema" if name == "ema" else "": each for name, each in scores.items()}
    return EpochResult(report, named, 1000, 2.0, 1.0)


def lines_of(epochs: EpochTable, number: int, found: EpochResult, best: Best, left: float | None) -> list[str]:
    trainer = SimpleNamespace(epoch=number - 1, step=0, process=Process(CPU))
    return epochs.lines(epoch_row(Epoch(trainer, found, {"data": 0.0})), found.scores, best, left)


def table(tmp_path, *options: str, has_ema: bool = False, width: int = 80) -> EpochTable:
    return EpochTable(small_config(tmp_path, "TRAIN.NUM_EPOCHS=40", *options), has_ema, lambda: width)


def cells(lines: list[str]) -> dict[str, str]:
    """{title: text} of a head and a line, whose columns stand below each other to the right."""
    head, line = lines
    titles, texts = head.replace("val loss", "val_loss").replace("EMA top-1", "EMA_top-1").split(), line.split()
    assert [head.replace(" ", "_").find(title) for title in titles]
    return dict(zip(titles, texts, strict=True))


def test_a_line_has_loss_accuracy_best_speed_and_time_left_in_aligned_columns(tmp_path):
    lines = lines_of(table(tmp_path), 3, result(raw=SCORES), Best(90.0, 3), 200.0)
    expected = {"epoch": "3/40", "loss": "0.2500", "val_loss": "0.5000", "top-1": "90.00%", "best": "*90.00%"}
    assert cells(lines) == expected | {"images/s": "500", "left": "3:20"}
    assert len(lines[0]) == len(lines[1]) < 80
    assert "%" not in lines[0] and "skipped" not in lines[1]


def test_the_best_is_marked_only_in_the_epoch_that_found_it(tmp_path):
    lines = lines_of(table(tmp_path), 4, result(raw=SCORES), Best(91.0, 3), None)
    assert cells(lines)["best"] == "91.00%" and cells(lines)["left"] == "-"


def test_an_epoch_without_evaluation_keeps_the_columns(tmp_path):
    epochs = table(tmp_path, has_ema=True)
    assert len(lines_of(epochs, 1, result(raw=SCORES, ema=SCORES), Best(90.0, 1), None)) == 2
    (line,) = lines_of(epochs, 2, result(), Best(90.0, 1), None)
    assert line.split() == ["2/40", "0.2500", "-", "-", "-", "90.00%", "500", "-"]


def test_the_ema_has_its_own_column(tmp_path):
    lines = lines_of(table(tmp_path, has_ema=True, width=100), 1, result(raw=SCORES, ema=SCORES), Best(90.0, 1), None)
    assert cells(lines)["EMA_top-1"] == "90.00%"


def test_the_metric_that_decides_has_the_column(tmp_path):
    scores = Scores(0.5, 90.0, 99.0, 100, 0, macro_f1=80.0, metric="macro_f1")
    head, line = lines_of(table(tmp_path, "TRAIN.BEST_METRIC=macro_f1"), 1, result(raw=scores), Best(80.0, 1), None)
    assert "macro F1" in head and "top-1" not in head and "80.00%" in line and "90.00%" not in line
    by_loss = Best(0.5, 1, metric="loss")
    head, line = lines_of(table(tmp_path, "TRAIN.BEST_METRIC=loss"), 1, result(raw=SCORES), by_loss, None)
    assert "top-1" in head and "90.00%" in line and "*0.5000" in line


def test_skipped_updates_are_told_where_there_were_any(tmp_path):
    report = Report(1, 0, 0.1, 0.5, 0.25, 0.9, 2, 0, 1.0, 1.0, 1.0)
    assert "2 updates skipped" in lines_of(table(tmp_path), 1, result(report, raw=SCORES), Best(), None)[1]


def test_the_head_comes_again_after_a_screen_and_where_the_columns_change(tmp_path):
    widths = [80]
    epochs = EpochTable(small_config(tmp_path), False, lambda: widths[0])
    counts = [len(lines_of(epochs, epoch, result(raw=SCORES), Best(), None)) for epoch in range(LINES_BELOW_A_HEAD + 2)]
    assert counts == [2, *[1] * (LINES_BELOW_A_HEAD - 1), 2, 1]
    widths[0] = 60
    assert len(lines_of(epochs, 100, result(raw=SCORES), Best(), None)) == 2


@pytest.mark.parametrize(("width", "has_ema"), [(60, False), (60, True), (80, True)])
def test_on_a_narrow_terminal_columns_go_and_lines_do_not_break(tmp_path, width, has_ema):
    scores = {"raw": SCORES, "ema": SCORES} if has_ema else {"raw": SCORES}
    lines = lines_of(table(tmp_path, has_ema=has_ema, width=width), 1, result(**scores), Best(90.0, 1), 90_000.0)
    assert all(len(line) < width for line in lines)
    assert {"epoch", "top-1", "best", "left"} <= set(lines[0].split())


def test_a_figure_of_an_epoch_is_one_line_that_puts_it_into_the_table_and_on_the_terminal(tmp_path, monkeypatch):
    columns = (
        *metrics.COLUMNS,
        metrics.Column("seven", "always 7", lambda epoch: 7.0, title="seven", text="{:.1f}".format),
    )
    for module in (metrics, console):
        monkeypatch.setattr(module, "COLUMNS", columns)
    lines = lines_of(table(tmp_path, width=100), 3, result(raw=SCORES), Best(90.0, 3), 200.0)
    assert cells(lines)["seven"] == "7.0"
    trainer = SimpleNamespace(epoch=2, step=0, process=Process(CPU))
    assert epoch_row(Epoch(trainer, result(raw=SCORES), {"data": 0.0}))["seven"] == 7.0
