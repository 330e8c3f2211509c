"""A run's folder can be read in any state: finished, killed or running. Other folders are refused."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.record.saved_files import title_of
from engine.record.saved_run import SavedRun
from tests.support.cases import cases_of, content_of, names_of
from tests.support.refusals import refused
from tests.support.runs import ROOT
from utils.errors import ConfigError
from utils.files import locked

pytestmark = pytest.mark.slow

CONFIG = """
TRAIN:
    NUM_EPOCHS: 3                             # flag -epochs
    BASE_LR: 0.002                            # configs/a # b.yaml
    MODEL_EMA: true                           # -opts
    GONE: 7                                   # old.yaml
    OPTIMIZER:
        KWARGS:
            amsgrad: true                     # -opts
MODEL:
    NAME: "a # b"                             # configs/x.yaml
"""
ROWS = [
    {"epoch": 0, "eval_top1": 50.0, "eval_loss": 1.0, "eval_top1_ema": 20.0, "eval_loss_ema": 2.0},
    {"epoch": 1, "eval_top1": 75.0, "eval_loss": 0.9, "eval_top1_ema": 75.0, "eval_loss_ema": 0.8},
    {"epoch": 2, "eval_top1": 60.0, "eval_loss": 0.5, "eval_top1_ema": 70.0, "eval_loss_ema": None},
]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    write_rows(tmp_path, ROWS)
    return tmp_path


def write_rows(folder: Path, rows: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_status(folder: Path, **facts) -> None:
    (folder / "status.json").write_text(json.dumps(facts))


def test_saved_settings_keep_their_types_and_origins(folder):
    run = SavedRun.open(folder)
    expected = {
        "TRAIN.NUM_EPOCHS": (3, "flag -epochs"),
        "TRAIN.BASE_LR": (0.002, "configs/a # b.yaml"),
        "TRAIN.MODEL_EMA": (True, "-opts"),
        "TRAIN.GONE": ("7", "old.yaml"),
        "TRAIN.OPTIMIZER.KWARGS": ({"amsgrad": True}, "-opts"),
        "MODEL.NAME": ("a # b", "configs/x.yaml"),
        "DATA.CROP_SCALE": ([0.08, 1.0], "default"),
    }
    assert {key: (run.settings[key], run.origins[key]) for key in expected} == expected


def test_negative_counts_of_a_damaged_status_are_ignored(folder):
    about = {"validation_images": -5, "training_images": 9, "parameters": -1}
    write_status(folder, state="done", about=about, total_epochs=-3, best_metric="top1")
    run = SavedRun.open(folder)
    assert run.run_facts == {"training_images": 9} and run.status.keys() == {"state", "about", "best_metric"}


def test_best_epoch_comes_from_checkpoint_or_else_metrics(folder):
    assert SavedRun.open(folder).best.state()[:4] == [75.0, 2, 0.8, "_ema"], (
        "among equal scores, the smallest loss is best"
    )
    write_status(folder, state="done", best={"top1": 70.0, "epoch": 3, "file": "best.pth"})
    assert SavedRun.open(folder).best.state()[:2] == [70.0, 3], "best.pth may be of another validation set"
    write_rows(folder, [{"epoch": 0, "train_loss": 1.0}])
    assert not SavedRun.open(folder).best.exists, "no epoch was evaluated"


def test_truncated_step_of_a_killed_run_is_ignored(folder):
    (folder / "steps.csv").write_text("step,loss\n0,2.5\n20,nan\n40")
    assert SavedRun.open(folder).steps == [{"step": 0, "loss": 2.5}, {"step": 20, "loss": None}]


@pytest.mark.parametrize(
    ("status", "is_locked", "state"),
    [
        ({"state": "training"}, True, "running"),
        ({"state": "training"}, False, "killed"),
        ({"state": "done"}, False, "done"),
        ({}, False, "unknown"),
    ],
)
def test_run_state_depends_on_its_lock_until_it_has_ended(folder, status, is_locked, state):
    write_status(folder, **status)
    with locked(folder / ".lock") if is_locked else contextlib.nullcontext():
        assert SavedRun.open(folder).state == state


def test_total_seconds_of_a_run_include_all_its_epochs(folder):
    assert SavedRun.open(folder).seconds is None
    write_rows(folder, [row | {"train_seconds": 10.0, "eval_seconds": 0.5} for row in ROWS])
    assert SavedRun.open(folder).seconds == pytest.approx(31.5)


def test_saved_run_reports_skips_peak_memory_epochs_and_excluded_updates(folder):
    steps = ["0,0,2", "5,0,3", "20,1,1", "40,3,4", "45,3,5", "60,4,"]  # epoch 3 did not finish
    (folder / "steps.csv").write_text("\n".join(["step,epoch,skipped", *steps, ""]))
    memory = zip(ROWS, (100, 300, None), (3, None, 0), strict=True)
    write_rows(folder, [row | {"memory_mb": each, "skipped": skipped} for row, each, skipped in memory])
    write_status(folder, total_epochs=7, left_out=[[1, 2], [3], 4, [5, "x"], ["x", 5], [8, 9]])
    run = SavedRun.open(folder)
    assert (run.num_skipped, run.memory, run.num_epochs) == (3 + 1 + 5, 300 * 2**20, 3)
    assert run.left_out == [(1, 2), (8, 9)] and run.planned_epochs == 3
    (folder / "config.yaml").write_text(CONFIG.replace("    NUM_EPOCHS: 3 ", "    BUDGET: 8h\n    NUM_EPOCHS: 3 "))
    assert SavedRun.open(folder).planned_epochs == 7, "the budget's number of epochs"


@pytest.mark.parametrize("file", cases_of("mistakes-in_a_runs_folder"))
def test_damaged_run_or_run_without_epochs_is_refused(folder, file):
    name, _, text = file.partition("=")
    (folder / name).write_text(content_of(text))
    with refused(ConfigError, *names_of("mistakes-in_a_runs_folder", file)):
        SavedRun.open(folder)


@pytest.mark.parametrize("path", ["nothing", "config.yaml", ".."])
def test_path_that_is_not_a_run_folder_is_refused(folder, path):
    with refused(ConfigError, folder / path):
        SavedRun.open(folder / path)


def test_reading_a_saved_run_does_not_import_torch():
    code = "import sys, engine.record.saved_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("dataset", "path", "name"),
    [
        ("imagefolder", "~/sets/pets", "pets"),
        ("csv", "/sets/pets/train.csv", "pets"),
        ("csv", "sets/pets", "pets"),
        ("csv", "pets.CSV", "pets.CSV"),
        ("parquet", "/sets/pets/all.parquet", "pets"),
        ("shards", "https://server/sets/pets", "pets"),
        ("csv", "", "csv"),
        ("digits", "/sets/pets", "digits"),
        ("imagenet2012", "/sets/imagenet", "imagenet2012"),
    ],
)
def test_title_of_a_run_names_the_folder_of_own_images(dataset, path, name):
    assert title_of({"MODEL.NAME": "vit", "DATA.DATASET": dataset, "DATA.DATA_PATH": path}) == f"vit on {name}"
