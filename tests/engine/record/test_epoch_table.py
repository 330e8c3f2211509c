"""The lines of epochs on a terminal, and advice; tables and curves, which go on from what an earlier start of a run wrote."""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from datasets import load_image_sets
from engine.evaluation.scores import Best, Scores
from engine.record import console, metrics
from engine.record.console import LINES_BELOW_A_HEAD, DataWaitAdvice, EpochTable
from engine.record.metrics import Epoch, EpochRows, Recorder, StepRows, epoch_row, peak_memory
from engine.record.plot import Plotter, figure_of, plots_of
from engine.train.counters import EpochResult, Report
from scripts.maintenance import make_settings_page
from tests.support.configs import CPU, small_config
from tests.support.printed import same_text
from tests.support.runs import epochs_of, rows_of
from tests.support.trainers import Lines
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


F1 = Scores(0.5, 90.0, 99.0, 100, 0, macro_f1=80.0, metric="macro_f1")
CASES = {
    "as mostly": ([], {"raw": SCORES}, Best(91.0, 2)),
    "a new best, with EMA": ([], {"raw": SCORES, "ema": replace(SCORES, top1=95.0)}, Best(95.0, 3, suffix="_ema")),
    "nothing evaluated yet": ([], {}, Best()),
    "by another metric": (["TRAIN.BEST_METRIC=macro_f1"], {"raw": F1}, Best(91.0, 2, metric="macro_f1")),
    "by the loss": (["TRAIN.BEST_METRIC=loss"], {"raw": SCORES}, Best(0.5, 3, metric="loss")),
}


def test_a_line_has_aligned_columns_of_which_one_is_of_the_metric_that_decides(tmp_path):
    pages = {}
    for number, (name, (options, scores, best)) in enumerate(CASES.items()):
        found = result(replace(REPORT, skipped=number % 3), **scores)
        lines = lines_of(table(tmp_path, *options, has_ema="ema" in scores), 3, found, best, number * 100.0 or None)
        pages[name] = "\n".join(lines)
        assert number % 3 or len(lines[0]) == len(lines[1]) < 80
    same_text("epochs_on_a_terminal", pages)


def test_the_head_comes_again_after_a_screen(tmp_path):
    epochs = table(tmp_path)
    counts = [len(lines_of(epochs, epoch, result(raw=SCORES), Best(), None)) for epoch in range(LINES_BELOW_A_HEAD + 2)]
    assert counts == [2, *[1] * (LINES_BELOW_A_HEAD - 1), 2, 1]


def test_a_figure_of_an_epoch_is_one_line_that_puts_it_into_the_table_and_on_the_terminal(tmp_path, monkeypatch):
    seven = metrics.Column("seven", "always 7", lambda epoch: 7.0, title="seven", text="{:.1f}".format)
    for module in (metrics, console):
        monkeypatch.setattr(module, "COLUMNS", (*metrics.COLUMNS, seven))
    lines = lines_of(table(tmp_path), 3, result(raw=SCORES), Best(90.0, 3), 200.0)
    assert [line.split()[-2] for line in lines] == ["seven", "7.0"]
    trainer = SimpleNamespace(epoch=2, step=0, process=Process(CPU))
    assert epoch_row(Epoch(trainer, result(raw=SCORES), {"data": 0.0}))["seven"] == 7.0


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
    assert [row["step"] for row in rows.rows] == [0, 20, 40], "which the curves are drawn of"
    StepRows(tmp_path, 60).close()
    assert (tmp_path / "steps.csv").read_text() == written


def full_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))


def test_an_epoch_that_found_no_room_is_written_at_the_end(tmp_path, monkeypatch):
    log, trainer = Lines(), SimpleNamespace(epoch=0, step=0, process=Process(CPU))
    trainer.config = config = small_config(tmp_path)
    recorder = Recorder(config, tmp_path, log, SimpleNamespace(), trainer, Mock())
    with monkeypatch.context() as full:
        full_disk(full)
        recorder.on_start_scored(trainer, SCORES, 1.0)
    assert len(log.warned) == 1 and not (tmp_path / "metrics.csv").exists()
    recorder.close()
    assert [row["epoch"] for row in epochs_of(tmp_path)] == [-1] and len(log.warned) == 1
    (row,) = rows_of(tmp_path / "metrics.csv")
    assert (row["eval_top1"], row["lr"], row["grad_norm"]) == ("90.0", "", ""), "what was not measured is empty"
    again = Recorder(config, tmp_path, log, SimpleNamespace(), trainer, Mock())
    again.on_start_scored(trainer, SCORES, 1.0)
    again.close()
    assert len(epochs_of(tmp_path)) == 1, "a run that starts anew has one row before its first epoch"


@pytest.mark.parametrize("has_budget", [False, True])
def test_only_a_run_with_a_budget_records_its_number_of_updates(tmp_path, has_budget):
    StepRows(tmp_path, 0, has_budget).close()
    assert ("num_updates" in (tmp_path / "steps.csv").read_text().strip().split(",")) is has_budget


def test_a_resumed_run_keeps_the_epochs_before_its_first(tmp_path):
    for first, epoch in ((0, 0), (1, 1), (1, 1)):
        rows = EpochRows(tmp_path, first)
        rows.add({"epoch": epoch, "train_loss": 1.0, **({"eval_top1": 5.0} if epoch else {})})
        assert rows.is_written
    assert [row["epoch"] for row in epochs_of(tmp_path)] == [0, 1]
    assert (tmp_path / "metrics.csv").read_text() == "epoch,train_loss,eval_top1\n0,1.0,\n1,1.0,5.0\n"


def test_a_curve_that_finds_no_room_leaves_the_one_before(tmp_path, monkeypatch):
    rows = [{"epoch": 0, "train_loss": 2.0, "eval_top1": 10.0}]
    Plotter(tmp_path, "too early", "top1").draw(rows, [], now=False)
    assert not list(tmp_path.iterdir())
    Plotter(tmp_path, "late enough", "top1", seconds_between=0.0).draw(rows, [], now=False)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(path.name for path in before) == ["accuracy.png", "loss.png"]
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        Plotter(tmp_path, "after", "top1").draw([{"epoch": 0, "train_loss": 1.0}], [], now=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_curves_are_drawn_a_minute_apart_and_at_the_end(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("engine.record.plot.time", SimpleNamespace(monotonic=lambda: clock[0]))
    plotter, rows, drawn_at = Plotter(tmp_path, "title", "top1"), epochs(10, 30), []
    for second, now in ((59, False), (61, False), (120, False), (122, False), (123, True)):
        clock[0] = second
        plotter.draw(rows, [], now)
        drawn_at += [second for _ in tmp_path.glob("loss.png")]
        (tmp_path / "loss.png").unlink(missing_ok=True)
    assert drawn_at == [61, 122, 123]


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
        assert (high - low == 1) == (number == 1)


@pytest.mark.parametrize(("number", "is_drawn"), [(1, False), (2, True)])
def test_rates_and_norms_of_two_updates_make_a_curve(number, is_drawn):
    found = drawn(epochs(10), steps=[{"step": step, "lr": 0.1, "grad_norm": 1.0} for step in range(number)])
    assert ("lr.png" in found) is is_drawn and ("grad_norm.png" in found) is is_drawn


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


@pytest.mark.parametrize(("scales", "is_drawn"), [((4.0, 4.0, 4.0), False), ((2.0, 1.0, 1.0), True)])
def test_a_loss_scale_that_moves_is_drawn_with_the_skipped_updates(scales, is_drawn):
    steps = [{"step": step, "loss_scale": scale, "skipped": step > 0} for step, scale in enumerate(scales)]
    found = drawn(epochs(10), steps=steps)
    assert ("loss_scale.png" in found) is is_drawn
    assert {axes.get_yscale() for file, axes in found.items() if file != "loss_scale.png"} == {"linear"}
    if is_drawn:
        axes = found["loss_scale.png"]
        scale, skipped = axes.lines
        assert (axes.get_yscale(), axes.yaxis.get_transform().base) == ("log", 2), "scales are powers of two"
        assert (scale.get_drawstyle(), list(scale.get_ydata())) == ("steps-post", list(scales))
        assert (skipped.get_label(), list(skipped.get_xdata())) == ("updates skipped", [1])


def advice_for(tmp_path, num_workers, num_cores, percents, updates=20, in_memory=False, device=CPU):
    """What is said at each of the reports of so many updates each."""
    config, said = small_config(tmp_path, f"DATA.NUM_WORKERS={num_workers}"), []
    image_set = load_image_sets(config)[0]
    image_set.in_memory = in_memory
    process = Process(device, num_cores=num_cores)
    advice = DataWaitAdvice(config, image_set, process, lambda line: said.__setitem__(-1, line))
    for index, percent in enumerate(percents):
        said.append("")
        advice.on_report(None, SimpleNamespace(step=index * updates, seconds=1.0, shares={"data": percent}))
    return said


WAITS = [  # workers, cores, percent of the time, device; a GPU's training takes a core
    *[
        (1, 8, 75, "cpu"),
        (4, 6, 90, "cpu"),
        (0, 8, 60, "cpu"),
        (0, 8, 100, "cpu"),
        (8, 8, 50, "cpu"),
        (0, 1, 50, "cpu"),
    ],
    *[(2, 16, 99, "cuda"), (3, 8, 75, "cuda"), (3, 8, 40, "cuda")],
]


def test_advice_is_the_remedy_that_applies_and_is_given_once(tmp_path):
    pages = {}
    for workers, cores, percent, device in WAITS:
        first, second, third = advice_for(tmp_path, workers, cores, [percent] * 3, device=torch.device(device))
        assert first == third == "", "start-up does not count"
        pages[f"{percent}%, {workers} workers, {cores} cores, {device}"] = second
    same_text("waiting_for_data", pages)


def test_advice_is_not_given_without_a_cause_a_remedy_or_enough_updates(tmp_path):
    assert not any(advice_for(tmp_path, 1, 8, [99, 19, 20, 5]))
    for num_workers in (0, 8):
        assert not any(advice_for(tmp_path, num_workers, 8, [99, 99, 99], in_memory=True))
    assert not any(advice_for(tmp_path, 1, 8, [0, 90, 0, 0, 0, 0], updates=2))
