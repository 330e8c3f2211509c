"""W&B and MLflow: a run on them through kill -9 and resume, and what a broken tracker costs the run."""

import csv
import json
import sys
import threading
import time
from pathlib import Path

import pytest

import engine.record.follower
import engine.record.trackers
from engine.record.board import Board, TrackedRun, epoch_figures, step_figures
from engine.record.board_tables import Tables
from engine.record.trackers import check_trackers, tracking
from tests.support.configs import CPU, SMALL, small_config
from tests.support.refusals import refused
from tests.support.runs import run
from tests.support.tracked import mlflow_points, wandb_records, wandb_rows
from utils.distributed import Process
from utils.errors import ConfigError

SHOWN = ["*/tracking/wandb/*/*.wandb", "mlruns/*/*/metrics/update"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """The output of a run that was killed in its second epoch, after both trackers had shown something of it."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "small.yaml").write_text(SMALL)
    output = folder / "output"
    flags = ["-cfg", str(folder / "small.yaml"), "-output", str(output), "-track", "wandb,mlflow", "-epochs", "2"]
    flags += ["-opts", "REPORT_FREQ=5", "SAVE_STEPS=8"]
    environment = {"WANDB_MODE": "offline"}
    faults = {"die_when_shown": [60, *SHOWN], "draw_nothing": []}
    assert run("main_single_gpu.py", *flags, faults=faults, environment=environment).returncode == -9
    faults = {"wait_long_for_trackers": [], "draw_nothing": []}
    ended = run("main_single_gpu.py", *flags, "-resume", "auto", faults=faults, environment=environment)
    assert ended.returncode == 0 and "warning" not in ended.printed, ended
    return output


@pytest.fixture(scope="module")
def folder(resumed) -> Path:
    (found,) = resumed.glob("train-*")
    return found


def epochs_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict]:
    with open(folder / "steps.csv") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def test_wandb_has_every_row_of_a_killed_and_resumed_run_once_as_in_its_tables(folder):
    (path,) = folder.glob("tracking/wandb/offline-run-*/*.wandb")
    rows, epochs, steps = wandb_rows(path), epochs_of(folder), steps_of(folder)
    shown = [{name: row[name] for name in row if not name.startswith("_")} for row in rows]
    assert [row for row in shown if "epoch" in row] == [{"epoch": row["epoch"], **epoch_figures(row)} for row in epochs]
    assert [row for row in shown if "step" in row] == [{"step": row["step"], **step_figures(row)} for row in steps]
    assert [row["epoch"] for row in epochs] == [0, 1] and len(steps) > 15


def test_wandb_gets_name_settings_and_end_of_the_run(folder):
    (path,) = folder.glob("tracking/wandb/offline-run-*/*.wandb")
    records = {each.WhichOneof("record_type"): each for each in wandb_records(path)}
    about = records["run"].run
    assert (about.project, about.display_name) == ("halfstep", folder.name)
    assert json.loads((folder / "tracking" / "wandb.json").read_text()) == {"id": about.run_id}
    settings = {each.key: json.loads(each.value_json) for each in about.config.update}
    assert settings["TRAIN.BASE_LR"] == 1e-3 and "MODEL.RESUME" not in settings
    assert records["exit"].exit.exit_code == 0


def test_mlflow_has_every_row_of_a_killed_and_resumed_run_once_as_in_its_tables(resumed, folder):
    (shown,) = [path.parent.parent for path in resumed.glob("mlruns/*/*/metrics/update")]
    epochs, steps = epochs_of(folder), steps_of(folder)
    for name in epoch_figures(epochs[0]):
        assert mlflow_points(shown, name) == [(row["epoch"], epoch_figures(row)[name]) for row in epochs], name
    assert [step for step, _ in mlflow_points(shown, "update")] == [row["step"] for row in steps]
    assert mlflow_points(shown, "step/lr") == [(row["step"], row["lr"]) for row in steps]
    status = json.loads((folder / "status.json").read_text())
    assert mlflow_points(shown, "best/top1")[-1] == (status["best"]["epoch"], status["best"]["top1"])
    assert (shown / "params" / "TRAIN.BASE_LR").read_text() == "0.001"
    assert "status: 3" in (shown / "meta.yaml").read_text()  # FINISHED
    assert (shown / "artifacts" / "config.yaml").is_file()


class Lines:
    """A log that keeps what it is told."""

    def __init__(self):
        self.said, self.warned = [], []
        self.say, self.warn = self.said.append, self.warned.append


def follow(folder: Path, monkeypatch, library: str) -> tuple[Lines, float]:
    """A run of one epoch on W&B, where this is the library `wandb`; what it says, and how long its end took."""
    (folder / "site").mkdir()
    (folder / "site" / "wandb.py").write_text(library)
    (folder / "status.json").write_text('{"state": "done", "saved": {"epoch": 1}}')
    (folder / "metrics.jsonl").write_text('{"epoch": 0, "train_loss": 1.5}\n')
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    config, log = small_config(folder, "TRACK=wandb"), Lines()
    with tracking(config, folder, Process(CPU), log):
        start = time.monotonic()
        while not (log.said or log.warned or (folder / "hangs").exists()):
            time.sleep(0.02)
            assert time.monotonic() - start < 300
        start = time.monotonic()
    return log, time.monotonic() - start


@pytest.mark.parametrize(
    "library",
    [
        "raise ImportError('libssl 0123456789abcdef')",
        "raise RuntimeError('401 for https://me:secret@server/0123456789abcdef')",
        "import os; os._exit(1)",
    ],
)
def test_a_tracker_that_fails_is_told_once_and_gives_no_secret_away(tmp_path, monkeypatch, library):
    if "_exit" in library:
        monkeypatch.setattr(engine.record.trackers, "PATIENCE", 300)
    log, _ = follow(tmp_path, monkeypatch, library)
    assert len(log.warned) == 1 and not log.said
    assert "wandb" in log.warned[0] and "secret" not in log.warned[0] and "0123456789abcdef" not in log.warned[0]


def test_a_tracker_that_hangs_is_left_at_the_end_of_the_run_with_all_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(engine.record.trackers, "PATIENCE", 0.2)
    library = f"import pathlib, time; pathlib.Path({str(tmp_path / 'hangs')!r}).touch(); time.sleep(3600)"
    log, _ = follow(tmp_path, monkeypatch, library)
    assert len(log.warned) == 1
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in running if str(tmp_path).encode() in line]


class Server(Board):
    """Refuses the first connection, and then takes everything until it has the second epoch, with which the run ends."""

    def __init__(self):
        self.refused, self.epochs = False, []
        self.has_ended, self.how, self.told = threading.Event(), engine.record.follower.END, []

    def connect(self, run: TrackedRun) -> Board:
        if not self.refused:
            self.refused = True
            raise ConnectionRefusedError("nobody listens")
        return self

    def tell(self, kind: str, text: str = "") -> None:
        self.told.append(kind)

    def add_epochs(self, rows) -> None:
        self.epochs += [row["epoch"] for row in rows]
        if len(self.epochs) == 2:
            self.has_ended.set()


def test_a_tracker_that_was_away_gets_everything_when_it_is_back(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
    (tmp_path / "status.json").write_text('{"state": "done", "saved": {"epoch": 2}}')
    server = Server()
    monkeypatch.setattr(engine.record.follower, "load_board", server.connect)
    monkeypatch.setattr(engine.record.follower, "SECONDS_BETWEEN_TRIES", 0.01)
    engine.record.follower.follow(TrackedRun(tmp_path, "wandb", {}), server)
    assert server.epochs == [0, 1] and server.told.count(engine.record.follower.WARN) == 1


def write_steps(folder: Path, steps: list[int], rest: str = "") -> None:
    new = folder / "new"
    new.write_text("step,loss,data_pct\n" + "".join(f"{step},0.5,\n" for step in steps) + rest)
    new.rename(folder / "steps.csv")


def test_rows_are_taken_once_also_from_a_table_that_a_resumed_run_writes_anew(tmp_path):
    tables = Tables(tmp_path)
    assert tables.new_steps() == []
    write_steps(tmp_path, [0, 5], rest="10,0.2")
    assert [row["step"] for row in tables.new_steps()] == [0, 5]
    with open(tmp_path / "steps.csv", "a") as file:
        file.write("5,1.5\n15,")
    assert tables.new_steps() == [{"step": 10, "loss": 0.25, "data_pct": 1.5}]
    write_steps(tmp_path, [0, 5, 8, 12, 20])
    assert [row["step"] for row in tables.new_steps()] == [12, 20]
    assert [row["step"] for row in Tables(tmp_path, step=8).new_steps()] == [12, 20]


def test_an_epoch_is_taken_when_a_checkpoint_holds_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
    tables = Tables(tmp_path)
    assert tables.new_epochs(all_of_them=False) == []
    (tmp_path / "status.json").write_text('{"saved": {"epoch": 1}}')
    assert tables.new_epochs(all_of_them=False) == [{"epoch": 0}]
    assert tables.new_epochs(all_of_them=True) == [{"epoch": 1}]


def test_a_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    config = small_config(tmp_path, "TRACK=mlflow")
    check_trackers(config)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with refused(ConfigError, "TRACK", "pip install mlflow-skinny"):
        check_trackers(config)
