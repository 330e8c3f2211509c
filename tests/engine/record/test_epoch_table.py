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


def table(tmp_path, *options: str, has_ema: bool = False) -> EpochTable:
    return EpochTable(small_config(tmp_path, "TRAIN.NUM_EPOCHS=40", *options), has_ema)


def cells(lines: list[str]) -> dict[str, str]:
    """{title: text} of a head and a line, whose columns stand below each other to the right."""
    head, line = lines
    for title in ("val loss", "EMA top-1", "macro F1"):
        head = head.replace(title, title.replace(" ", "_"))
    return dict(zip(head.split(), line.split(), strict=True))


F1 = Scores(0.5, 90.0, 99.0, 100, 0, macro_f1=80.0, metric="macro_f1")
USUAL = {"epoch": "3/40", "loss": "0.2500", "val_loss": "0.5000", "top-1": "90.00%", "best": "91.00%"}
USUAL |= {"images/s": "500", "left": "-"}


@pytest.mark.parametrize(
    ("options", "scores", "best", "different"),
    [
        ([], {"raw": SCORES}, Best(91.0, 2), {}),
        ([], {"raw": SCORES}, Best(90.0, 3), {"best": "*90.00%"}),
        ([], {"raw": SCORES, "ema": SCORES}, Best(91.0, 2), {"EMA_top-1": "90.00%"}),
        ([], {}, Best(91.0, 2), {"val_loss": "-", "top-1": "-"}),
        (["TRAIN.BEST_METRIC=macro_f1"], {"raw": F1}, Best(91.0, 2, metric="macro_f1"), {"macro_F1": "80.00%"}),
        (["TRAIN.BEST_METRIC=loss"], {"raw": SCORES}, Best(0.5, 3, metric="loss"), {"best": "*0.5000"}),
    ],
)
def test_a_line_has_aligned_columns_of_which_one_is_of_the_metric_that_decides(
    tmp_path, options, scores, best, different
):
    head, line = lines_of(table(tmp_path, *options, has_ema="ema" in scores), 3, result(**scores), best, None)
    expected = USUAL | different
    if "macro_F1" in expected:
        del expected["top-1"]
    assert cells([head, line]) == expected
    assert len(head) == len(line) < 80 and "%" not in head and "skipped" not in line


def test_skipped_updates_and_the_time_left_are_told_where_there_are_any(tmp_path):
    report = Report(1, 0, 0.1, 0.5, 0.25, 0.9, 2, 0, 1.0, 1.0, 1.0)
    line = lines_of(table(tmp_path), 1, result(report, raw=SCORES), Best(), 200.0)[1]
    assert "2 updates skipped" in line and "3:20" in line


def test_the_head_comes_again_after_a_screen(tmp_path):
    epochs = table(tmp_path)
    counts = [len(lines_of(epochs, epoch, result(raw=SCORES), Best(), None)) for epoch in range(LINES_BELOW_A_HEAD + 2)]
    assert counts == [2, *[1] * (LINES_BELOW_A_HEAD - 1), 2, 1]


def test_a_figure_of_an_epoch_is_one_line_that_puts_it_into_the_table_and_on_the_terminal(tmp_path, monkeypatch):
    seven = metrics.Column("seven", "always 7", lambda epoch: 7.0, title="seven", text="{:.1f}".format)
    for module in (metrics, console):
        monkeypatch.setattr(module, "COLUMNS", (*metrics.COLUMNS, seven))
    lines = lines_of(table(tmp_path), 3, result(raw=SCORES), Best(90.0, 3), 200.0)
    assert cells(lines)["seven"] == "7.0"
    trainer = SimpleNamespace(epoch=2, step=0, process=Process(CPU))
    assert epoch_row(Epoch(trainer, result(raw=SCORES), {"data": 0.0}))["seven"] == 7.0
