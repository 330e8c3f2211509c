"""The lines of epochs on a terminal, advice, and tables that continue the rows of an earlier start of the run."""

import errno
import math
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from datasets.build import cores_to_read
from engine.evaluation.best import Best
from engine.evaluation.scores import Scores
from engine.record import columns, console
from engine.record.advice import DataWaitAdvice
from engine.record.columns import COLUMNS, Column, Epoch, epoch_row, peak_memory
from engine.record.console import EpochPrinter
from engine.record.metrics import EpochRows, Recorder, StepRows
from engine.train.counters import EpochResult, Report
from tests.support.configs import CPU, small_config
from tests.support.opened import open_sets
from tests.support.runs import epochs_of, rows_of
from tests.support.trainers import Lines
from utils.distributed import Process

REPORT = Report(1, 0, 0.1, 0.5, 0.25, 0.9, 0, 0, 1.0, 1.0, 1.0)
SCORES = Scores(0.5, 90.0, 99.0, 100, 0)


def result(report=REPORT, **scores: Scores) -> EpochResult:
    named = {"_ema" if name == "ema" else "": each for name, each in scores.items()}
    return EpochResult(report, named, 1000, 2.0, 1.0, times={"data": 1.5})


def epoch_of(number: int, found: EpochResult) -> Epoch:
    trainer = SimpleNamespace(epoch=number - 1, step=440, process=Process(CPU))
    return Epoch(trainer, found)


def lines_of(printer: EpochPrinter, number: int, found: EpochResult, best: Best, left: float | None) -> list[str]:
    return printer.terminal_lines(epoch_row(epoch_of(number, found)), found.scores, best, left, 40)


def printer_of(tmp_path, *options: str, has_ema: bool = False) -> EpochPrinter:
    return EpochPrinter(small_config(tmp_path, *options), has_ema)


F1 = Scores(0.5, 90.0, 99.0, 100, 0, macro_f1=80.0, metric="macro_f1")


def test_column_with_a_title_is_shown_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "COLUMNS", (*COLUMNS, Column("seven", "always 7", title="seven", text="{:.1f}")))
    row = epoch_row(epoch_of(3, result(raw=SCORES))) | {"seven": 7.0}
    lines = printer_of(tmp_path).terminal_lines(row, {"": SCORES}, Best(90.0, 3), 200.0, 40)
    assert [line.split()[-2] for line in lines] == ["seven", "7.0"]


@pytest.mark.parametrize(
    ("changes", "training", "machine"),
    [
        ({}, "Train Loss: 0.2500, Train Acc: 0.9000, time: 2.00", "500.0 images/s, 64 MB"),
        ({"mean_loss": math.nan, "accuracy": math.nan}, "Train Loss: nan, time: 2.00", "500.0 images/s, 64 MB"),
        (
            {"loss_scale": 1024.0, "skipped": 3},
            "Train Loss: 0.2500, Train Acc: 0.9000, time: 2.00",
            "500.0 images/s, 64 MB, loss scale 1024, 3 updates skipped",
        ),
    ],
)
def test_log_omits_unknown_accuracy_usual_scale_and_no_skips(tmp_path, monkeypatch, changes, training, machine):
    monkeypatch.setattr(columns, "peak_memory", lambda device: 64 * 2**20)
    epoch = epoch_of(3, result(replace(REPORT, **changes), raw=SCORES))
    lines = printer_of(tmp_path).log_lines(epoch_row(epoch), epoch, 40)
    assert lines[0].endswith(f", {training}") and lines[1].endswith(", time: 1.00") and lines[2].strip() == machine


@pytest.mark.parametrize(("seconds", "speed"), [(2.0, "500"), (0.1, "10,000"), (400.0, "2.50")])
def test_slow_speeds_have_decimals_on_a_terminal(tmp_path, seconds, speed):
    slow = replace(result(raw=SCORES), training_seconds=seconds)
    assert speed in lines_of(printer_of(tmp_path), 3, slow, Best(90.0, 3), None)[-1].split()


def test_only_the_line_of_the_best_epoch_has_a_star(tmp_path):
    lines = [lines_of(printer_of(tmp_path), number, result(raw=SCORES), Best(90.0, 3), None)[-1] for number in (3, 4)]
    assert ["*90.0" in line for line in lines] == [True, False] and "90.0" in lines[1]


def test_best_value_is_shown_in_the_unit_of_its_own_metric(tmp_path):
    printer, best = printer_of(tmp_path, "TRAIN.BEST_METRIC=loss"), Best(0.521, 2, metric="loss")
    words = lines_of(printer, 3, result(raw=SCORES), best, None)[-1].split()
    assert "0.5210" in words and "90.00%" in words


# {column: its value} for the epoch of the test below.
USUAL = {
    "epoch": 2,
    "train_loss": 0.25,
    "eval_loss": 0.5,
    "eval_top1": 90.0,
    "eval_top5": 99.0,
    "lr": 0.1,
    "train_top1": 90.0,
    "eval_macro_f1": 80.0,
    "step": 440,
    "images_per_s": 500.0,
    "data_wait_pct": 1.5,
    "memory_mb": 64,
    "loss_scale": 1024.0,
    "skipped": 3,
    "grad_norm": 0.75,
    "train_seconds": 2.0,
    "eval_seconds": 1.0,
}


def test_metrics_row_holds_all_values_of_an_epoch(monkeypatch):
    monkeypatch.setattr(columns, "peak_memory", lambda device: 64 * 2**20 + 99_999)
    report = replace(REPORT, loss_scale=1024.0, skipped=3, mean_grad_norm=0.75)
    assert epoch_row(epoch_of(3, result(report, raw=F1))) == USUAL


def test_described_columns_are_those_of_a_row_in_its_order():
    row = epoch_row(epoch_of(3, result(raw=F1)))
    described = [name for column in COLUMNS for name in column.name.split(", ")]
    assert [name for name in described if name in row] == [*row]
    assert all(set(column.name.split(", ")) & row.keys() for column in COLUMNS), (
        "a column is described but not computed"
    )


def test_old_step_rows_survive_added_columns(tmp_path, monkeypatch):
    (tmp_path / "steps.csv").write_text("step,loss\n0,2.5\n20,2.25\n")
    monkeypatch.setattr("engine.record.metrics.STEP_COLUMNS", dict.fromkeys(("step", "loss", "data_pct")))
    rows = StepRows(tmp_path, 20)
    rows.add({"step": 20, "loss": 2.0, "data_pct": 12.5})
    assert (tmp_path / "steps.csv").read_text().endswith("20,2,12.5\n"), "a kill must not lose the row"
    rows.add({"step": 40, "loss": 1.5, "data_pct": None})
    rows.close()
    written = (tmp_path / "steps.csv").read_text()
    assert written == "step,loss,data_pct\n0,2.5,\n20,2,12.5\n40,1.5,\n"
    assert [row["step"] for row in rows.rows] == [0, 20, 40], "the curves are drawn from these rows"
    StepRows(tmp_path, 60).close()
    assert (tmp_path / "steps.csv").read_text() == written


def full_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))


def test_full_disk_delays_the_epoch_row_until_close(tmp_path, monkeypatch):
    log, trainer = Lines(), SimpleNamespace(epoch=0, step=0, best=Best(), before=None, process=Process(CPU))
    trainer.config = small_config(tmp_path)
    recorder = Recorder(tmp_path, log, trainer, None, Mock())
    with monkeypatch.context() as full:
        full_disk(full)
        recorder.on_start_scored(trainer, SCORES, 1.0)
    assert len(log.warned) == 1 and not (tmp_path / "metrics.csv").exists()
    recorder.close()
    assert [row["epoch"] for row in epochs_of(tmp_path)] == [-1] and len(log.warned) == 1
    (row,) = rows_of(tmp_path / "metrics.csv")
    assert (row["eval_top1"], row["lr"], row["grad_norm"]) == ("90.0", "", ""), "cells without a value must be empty"
    again = Recorder(tmp_path, log, trainer, None, Mock())
    again.on_start_scored(trainer, SCORES, 1.0)
    again.close()
    assert len(epochs_of(tmp_path)) == 1, "a restarted run must have only one row before its first epoch"


@pytest.mark.parametrize("has_budget", [False, True])
def test_steps_csv_has_num_updates_column_only_for_runs_with_budget(tmp_path, has_budget):
    StepRows(tmp_path, 0, has_budget).close()
    assert ("num_updates" in (tmp_path / "steps.csv").read_text().strip().split(",")) is has_budget


def test_resumed_run_keeps_earlier_epoch_rows(tmp_path):
    for first, epoch in ((0, 0), (1, 1), (1, 1)):
        rows = EpochRows(tmp_path, first)
        rows.add({"epoch": epoch, "train_loss": 1.0, **({"eval_top1": 5.0} if epoch else {})})
        assert rows.is_written
    assert [row["epoch"] for row in epochs_of(tmp_path)] == [0, 1]
    assert (tmp_path / "metrics.csv").read_text() == "epoch,train_loss,eval_top1\n0,1.0,\n1,1.0,5.0\n"


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_cpu_memory_is_in_bytes_on_each_system(monkeypatch, platform, unit):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=300_000))
    assert peak_memory(CPU) == 300_000 * unit


def advice_for(tmp_path, num_workers, num_cores, percents, updates=20, device=CPU):
    """Return the advice that is printed at each report."""
    config, said = small_config(tmp_path, f"DATA.NUM_WORKERS={num_workers}"), []
    image_set = open_sets(config)[0]
    process = Process(device, num_cores=num_cores)
    advice = DataWaitAdvice(config, image_set, process, lambda line: said.__setitem__(-1, line))
    for index, percent in enumerate(percents):
        said.append("")
        advice.on_report(None, SimpleNamespace(step=index * updates, seconds=1.0, shares={"data": percent}))
    return said


def test_data_wait_advice_is_omitted_if_cause_or_remedy_is_missing(tmp_path):
    assert not any(advice_for(tmp_path, 1, 8, [99, 19, 20, 5]))
    assert not any(advice_for(tmp_path, 1, 8, [0, 90, 0, 0, 0, 0], updates=2))


def test_advice_with_as_many_workers_as_cores_is_the_cache_and_no_further_worker(tmp_path):
    most = cores_to_read(Process(CPU, num_cores=8))
    for num_workers, remedy in ((most - 1, f"-num_workers {most}"), (most, "DATA.CACHE=")):
        said = "".join(advice_for(tmp_path, num_workers, 8, [0, 30, 30]))
        assert remedy in said and ("-num_workers" in remedy) == ("-num_workers" in said)
