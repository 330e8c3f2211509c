"""A run's folder is read as it is: finished, killed, still going, of an older version; what is no run is refused."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.record.saved_run import SavedRun
from tests.support.runs import ROOT
from utils.errors import ConfigError

SAVED = ROOT / "tests" / "data" / "saved_runs"
CONFIG = """
EVAL: false                                   # default
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


def test_settings_have_their_types_and_the_origins_of_the_file(folder):
    run = SavedRun.open(folder)
    expected = {
        "TRAIN.NUM_EPOCHS": (3, "flag -epochs"),
        "TRAIN.BASE_LR": (0.002, "configs/a # b.yaml"),
        "TRAIN.MODEL_EMA": (True, "-opts"),
        "TRAIN.GONE": ("7", "old.yaml"),
        "TRAIN.OPTIMIZER.KWARGS": ({"amsgrad": True}, "-opts"),
        "MODEL.NAME": ("a # b", "configs/x.yaml"),
        "DATA.CROP_SCALE": ([0.08, 1.0], "default"),
        "DATA.EXIF": ("ignore", "default"),  # what runs did before there was the setting
    }
    assert {key: (run.settings[key], run.origins[key]) for key in expected} == expected


def test_the_best_epoch_is_that_of_the_checkpoint_and_else_of_the_figures(folder):
    assert SavedRun.open(folder).best[:4] == (75.0, 2, 0.8, "_ema"), "of equal ones the smaller loss"
    write_status(folder, state="done", best={"top1": 70.0, "epoch": 3, "file": "best.pth"})
    assert SavedRun.open(folder).best[:2] == (70.0, 3), "best.pth may be of other validation images"
    write_rows(folder, [{"epoch": 0, "train_loss": 1.0}])
    assert SavedRun.open(folder).best.epoch == 0, "nothing was evaluated"


def test_lines_that_a_kill_cut_off_are_left_out(folder):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "eval_to')
    (folder / "steps.csv").write_text("step,loss\n0,2.5\n20,nan\n40")
    run = SavedRun.open(folder)
    assert [row["epoch"] for row in run.epochs] == [0, 1, 2]
    assert run.steps == [{"step": 0, "loss": 2.5}, {"step": 20, "loss": None}]


def test_a_run_knows_whether_it_is_going_killed_or_done(folder):
    here, elsewhere = socket.gethostname(), "some-other-machine"
    beat, old = (time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - age)) for age in (5, 7200))
    gone = subprocess.Popen(["true"])
    gone.wait()
    cases = {
        "running": [
            {"state": "training", "host": here, "pid": os.getpid(), "heartbeat": old},
            {"state": "training", "host": elsewhere, "pid": gone.pid, "heartbeat": beat},
        ],
        "killed": [
            {"state": "training", "host": here, "pid": gone.pid, "heartbeat": beat},
            {"state": "training", "host": elsewhere, "pid": os.getpid(), "heartbeat": old},
            {"state": "training"},
        ],
        "done": [{"state": "done"}],
        "unknown": [{}],
    }
    for expected, statuses in cases.items():
        for status in statuses:
            write_status(folder, **status)
            assert SavedRun.open(folder).state == expected, status


def test_seconds_are_those_of_the_epochs_of_all_starts(folder):
    assert SavedRun.open(folder).seconds is None
    write_rows(folder, [row | {"train_seconds": 10.0, "eval_seconds": 0.5} for row in ROWS])
    assert SavedRun.open(folder).seconds == pytest.approx(31.5)


@pytest.mark.parametrize("kind", ("single", "mixed", "sharded"))
def test_folders_of_earlier_versions_are_read(kind):
    (folder,) = (SAVED / kind).iterdir()
    run = SavedRun.open(folder)
    assert run.state == "unknown" and run.best.epoch and run.steps
    assert run.origins["TRAIN.NUM_EPOCHS"] == ("digits.yaml" if kind == "mixed" else "tiny.yaml")


def test_what_is_no_run_with_an_epoch_is_refused(folder, tmp_path):
    (unfinished,) = (SAVED / "augmented").iterdir()
    refused = {
        "no folder": tmp_path / "nothing",
        "a file": folder / "config.yaml",
        "no run": SAVED / "single",
        "no epoch": unfinished,
    }
    damaged = {
        "status.json": "{",
        "metrics.jsonl": '{"epoch": 0}\nnonsense\n{"epoch": 1}\n',
        "config.yaml": "TRAIN: [",
    }
    for name, text in damaged.items():
        refused[f"damaged {name}"] = copy = tmp_path / f"with-{name}"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("with-*"))
        (copy / name).write_text(text)
    refused["an evaluation"] = evaluation = tmp_path / "with-eval"
    shutil.copytree(folder, evaluation, ignore=shutil.ignore_patterns("with-*"))
    (evaluation / "config.yaml").write_text("EVAL: true\n")
    for what, path in refused.items():
        with pytest.raises(ConfigError) as error:
            SavedRun.open(path)
        assert str(path) in str(error.value), what


def test_reading_a_run_imports_no_torch():
    code = "import sys, engine.record.saved_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
