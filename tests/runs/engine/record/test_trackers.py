"""W&B and MLflow: a run with both through kill -9 and resume, and how a broken tracker affects a run."""

import json
import struct
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import yaml
from PIL import Image

import engine.record.trackers as module
from engine.record.trackers import (
    LISTENERS,
    Trackers,
    TrackerThread,
    check_trackers,
    ending_of,
    figures_of,
    shown_settings,
)
from engine.record.trackers.listeners import Ending, Listener, TensorBoard, TrackedRow
from tests.support.cases import cases_of, value_of
from tests.support.configs import small_config
from tests.support.forks import DEADLINE
from tests.support.refusals import assert_names, refused
from tests.support.run_hash import run_hash
from tests.support.runs import epochs_of, rows_of, run, run_folder, status_of
from tests.support.trainers import Lines
from utils.errors import ConfigError

BLOCK, HEADER = 32768, 7  # bytes; W&B's files are LevelDB logs; the file header is as long as a record header


def wandb_records(path: Path) -> list:
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, found, text = path.read_bytes(), HEADER, [], b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        text += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(text))
            text = b""
    return found


def wandb_rows(records: list) -> list[dict]:
    """Return the logged values, one dict per call, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def mlflow_points(run: Path, name: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of a metric in order."""
    lines = (run / "metrics" / name).read_text().splitlines()
    return [(int(step), float(value)) for _, value, step in (line.split() for line in lines)]


pytestmark = pytest.mark.slow

SHOWN = ["*/tracking/wandb.json", "mlruns/*/*/metrics/step/lr"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, small_yaml) -> Path:
    """Return the output of a run that was killed in its second epoch, after both trackers had received rows."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("tracked")
    output = folder / "output"
    flags = ["-cfg", str(small_yaml), "-output", str(output), "-epochs", "2"]
    flags += ["-opts", "REPORT_FREQ=1", "SAVE_STEPS=2", "TRACK=wandb,mlflow"]
    environment = {"WANDB_MODE": "offline"}
    faults = {"die_when_shown": [15, *SHOWN], "draw_nothing": []}
    assert run("main_single_gpu.py", *flags, faults=faults, environment=environment).returncode == -9
    faults = {"wait_long_for_trackers": [], "draw_nothing": []}
    ended = run("main_single_gpu.py", *flags, "-resume", "auto", faults=faults, environment=environment).done()
    assert "warning" not in ended.printed, ended
    flags[3], flags[-1] = str(folder / "plain"), "TRACK=none"
    assert run("main_single_gpu.py", *flags, faults={"draw_nothing": []}).returncode == 0
    (tracked,) = output.glob("train-*")
    assert run_hash(tracked) == run_hash(run_folder(folder / "plain")), "trackers must not change the weights"
    return output


@pytest.fixture(scope="module")
def folder(resumed) -> Path:
    (found,) = resumed.glob("train-*")
    return found


def steps_of(folder: Path) -> list[dict]:
    return [{name: float(text) for name, text in row.items() if text} for row in rows_of(folder / "steps.csv")]


def timeless(axis: str, row: dict) -> dict[str, float]:
    """Return the values without times: for repeated updates, trackers keep the first times."""
    return {name: value for name, value in figures_of(axis, row).items() if not name.startswith("time/")}


@pytest.mark.long
def test_wandb_has_all_rows_of_a_resumed_run(folder):
    *_, path = sorted(folder.glob("tracking/wandb/offline-run-*/*.wandb"))  # the newest file has all rows
    records = {each.WhichOneof("record_type"): each for each in wandb_records(path)}
    rows, epochs, steps = wandb_rows(wandb_records(path)), epochs_of(folder), steps_of(folder)
    assert [row["epoch"] for row in epochs] == [0, 1] and len(steps) > 15
    for axis, table in (("epoch", epochs), ("step", steps)):
        for row, expected in zip([row for row in rows if axis in row], table, strict=True):
            figures = {name: value for name, value in row.items() if not name.startswith("_")}
            assert figures == pytest.approx({axis: expected[axis], **figures_of(axis, expected)})
    about = records["run"].run
    assert (about.project, about.display_name) == ("halfstep", folder.name)
    assert json.loads((folder / "tracking" / "wandb.json").read_text())["id"] == about.run_id
    settings = {each.key: json.loads(each.value_json) for each in about.config.update}
    assert settings["TRAIN.BASE_LR"] == 1e-3 and "MODEL.RESUME" not in settings
    assert records["exit"].exit.exit_code == 0


def test_wandb_resends_rows_that_a_kill_may_have_lost(tmp_path, monkeypatch):
    for offline, expected in ((True, [0, 5, 9]), (False, [9])):
        sent: list[dict] = []
        begun = SimpleNamespace(offline=offline, dir=tmp_path, url="", summary={}, log=sent.append)
        begun.define_metric = begun.finish = lambda *_, **__: None
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda begun=begun, **_: begun, Settings=dict))
        (tmp_path / "tracking").mkdir(exist_ok=True)
        (tmp_path / "tracking/wandb.json").write_text('{"id": "x", "step": 5, "epoch": 5}')
        trackers = Trackers([TrackerThread("wandb", small_config(tmp_path), tmp_path, Lines())])
        trackers.begin(9, 1, [{"step": 0, "loss": 2.0}, {"step": 5, "loss": 1.0}], [])
        trackers.add("step", {"step": 9, "loss": 0.5})
        trackers.end(Ending("done", {"top1": 70.0}, ()))
        assert [row["step"] for row in sent] == expected and begun.summary == {"best/top1": 70.0}


def test_tensorboard_tracker_drops_repeated_steps_and_adds_pictures(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Files of one second are ordered by their number in this process as text: 10 before 9.
    monkeypatch.setattr(
        "tensorboard.summary.writer.event_file_writer._global_uid", SimpleNamespace(get=count().__next__)
    )
    Image.new("RGB", (30, 20)).save(tmp_path / "loss.png")
    board, tracker = EventAccumulator(str(tmp_path / "tensorboard")), TensorBoard(tmp_path, {}, None)
    for start, value in ((0, 1.0), (1, 2.0)):
        assert tracker.go_back(start)
        tracker.add([TrackedRow("step", number, {"loss": value}) for number in range(start, 3)])
    tracker.end(Ending("done", {}, [tmp_path / "loss.png"]))
    assert [(each.step, each.value) for each in board.Reload().Scalars("loss")] == [(0, 1.0), (1, 2.0), (2, 2.0)]
    assert [(each.width, each.height) for each in board.Images("loss")] == [(30, 20)]


def test_mlflow_has_all_rows_of_a_resumed_run(resumed, folder):
    (shown,) = [path.parent.parent.parent for path in resumed.glob("mlruns/*/*/metrics/step/lr")]
    epochs, steps = epochs_of(folder), steps_of(folder)
    for axis, rows in (("epoch", epochs), ("step", steps)):
        for name in timeless(axis, rows[0]):
            expected = {row[axis]: figures_of(axis, row)[name] for row in rows}
            points = mlflow_points(shown, name)
            # Rows in transit at the kill may be sent twice, the second time with the digits of the CSV file.
            assert list(dict(points)) == list(expected), name
            assert points == [(step, pytest.approx(expected[step])) for step, _ in points], name
    status = status_of(folder)
    assert mlflow_points(shown, "best/top1")[-1] == (status["best"]["epoch"], status["best"]["top1"])
    params = {name: (shown / "params" / name).read_text() for name in ("TRAIN.BASE_LR", "DATA.DATASET")}
    assert params == {"TRAIN.BASE_LR": "0.001", "DATA.DATASET": "digits"}
    assert "status: 3" in (shown / "meta.yaml").read_text()  # FINISHED
    assert (shown / "artifacts" / "config.yaml").is_file()


class SimulatedWandb:
    """Simulates the module wandb and W&B's server, which shows a state for each run."""

    Settings = dict

    def __init__(self):
        self.runs = {}

    def init(self, id: str, **_) -> SimpleNamespace:
        run = self.runs.setdefault(id, SimpleNamespace(id=id, rows=[], summary={}, offline=False, url="https://server"))
        run.state, run.log, run.define_metric = "running", run.rows.append, lambda *_, **__: None
        run.finish = lambda exit_code: setattr(run, "state", "failed" if exit_code else "finished")
        return run


def shown_on(name: str, folder: Path, wandb: SimulatedWandb) -> tuple[str, list[tuple[int, float]]]:
    """Return the state of the only run on a tracker, and the (step, value) pairs of its loss."""
    if name == "wandb":
        (run,) = wandb.runs.values()
        return run.state.upper(), [(row["step"], row["loss"]) for row in run.rows]
    if name == "tensorboard":  # shows no states
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        points = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("loss")
        return "RUNNING", [(each.step, each.value) for each in points]
    from mlflow import MlflowClient

    client = MlflowClient((folder.parent / "mlruns").as_uri())
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    points = client.get_metric_history(run.info.run_id, "loss")
    return run.info.status, sorted((each.step, each.value) for each in points)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_resumed_run_is_running_on_each_tracker_halfway(tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if name == "tensorboard":
        from tensorboard.summary.writer import event_file_writer

        # Files of the same second are read by their names, which end with this number: 10 would come before 9.
        monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    server, folder = SimulatedWandb(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", server)
    folder.mkdir()
    (folder / "config.yaml").touch()
    identity = None
    for start, state in enumerate([None, "stopped", "failed", "done", "done"]):  # None: kill -9
        tracker = LISTENERS[name](folder, {}, identity)
        identity = tracker.identity
        tracker.go_back(start)
        tracker.add([TrackedRow("step", start, {"loss": start / 2})])
        assert shown_on(name, folder, server) == ("RUNNING", [(step, step / 2) for step in range(start + 1)])
        if state:
            tracker.end(Ending(state, {}, ()))
            assert name == "tensorboard" or shown_on(name, folder, server)[0] != "RUNNING"


class Fake(Listener):
    """Records the numbers of its rows. It can fail or hang at a chosen place."""

    identity, place = "a", "https://me:secret@server/run"

    def __init__(self, **raised: Exception | float):
        self.rows, self.returns, self.ending, self._raised = [], [], None, raised

    def _reach(self, place: str) -> None:
        error = self._raised.get(place, 0)
        if isinstance(error, BaseException):
            raise error
        time.sleep(error)

    def open(self, *_: object) -> "Fake":
        self._reach("open")
        return self

    def add(self, rows) -> None:
        self._reach("add")
        self.rows += [(row.axis, row.number) for row in rows]

    def go_back(self, step: int) -> bool:
        self.returns.append(step)
        return False

    def end(self, ending: Ending) -> None:
        self._reach("end")
        self.ending = ending


def track(tracker: Fake, folder: Path) -> Lines:
    """Simulate a run with two earlier rows, and an epoch in which a rollback repeats an update. Return its log."""
    log = Lines()
    with patch.dict(LISTENERS, wandb=tracker.open):
        trackers = Trackers([TrackerThread("wandb", small_config(folder), folder, log)])
        _simulate(trackers)
    return log


def _simulate(trackers: Trackers) -> None:
    earlier = [{"step": 0, "loss": 2.0}, {"step": 5, "loss": 1.0}]
    trackers.begin(8, 1, earlier, [{"epoch": 0, "train_loss": 1.0}])
    trackers.add("step", {"step": 10, "loss": 0.5})
    trackers.begin(8, 1, earlier, [{"epoch": 0, "train_loss": 1.0}])
    for row in ({"step": 10, "loss": 0.5}, {"step": 15, "loss": None}):
        trackers.add("step", row)
    trackers.add("epoch", {"epoch": 1, "train_loss": 0.5})
    trackers.end(Ending("done", {"top1": 50.0, "epoch": 2}, ()))


def test_tracker_gets_unsent_rows_exactly_once(tmp_path):
    path, new = tmp_path / "tracking" / "wandb.json", [("step", 10), ("step", 15), ("epoch", 1)]
    known = {
        None: [("step", 0), ("step", 5), ("epoch", 0), *new],
        '{"id": "a", "step": 0, "epoch": -1}': [("step", 5), ("epoch", 0), *new],
    }
    for text, expected in known.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text or "")
        tracker = Fake()
        log = track(tracker, tmp_path)
        assert tracker.rows == expected and tracker.returns == [8, 8]
        assert tracker.ending.state == "done" and not log.warned
        assert len(log.said) == 1 and "secret" not in log.said[0]
        assert json.loads(path.read_text()) == {"id": "a", "step": 15, "epoch": 1}


@pytest.mark.parametrize(("place", "kind"), [("open", SystemExit), ("add", RuntimeError), ("end", SystemExit)])
def test_failing_tracker_warns_once_without_secrets(tmp_path, monkeypatch, place, kind):
    for name, value in (("WANDB_API_KEY", "0123456789abcdef"), ("SHORT_KEY", "401"), ("HOST_OF_ALL", "server")):
        monkeypatch.setenv(name, value)  # a short value may be part of any word, and a host name is no secret
    log = track(Fake(**{place: kind("401 for https://me:secret@server/0123456789abcdef")}), tmp_path)
    (line,) = log.warned
    assert "secret" not in line and "0123456789abcdef" not in line
    assert_names(line, "wandb", "401", "server")
    assert shown_settings(small_config(tmp_path, "SAVE=output/0123456789abcdef"))["SAVE"] == "output/***"


def test_tracker_metrics_use_documented_names():
    epoch = {"epoch": 3, "train_loss": 1.0, "eval_top1_ema": 2.0, "eval_map": None, "lr": 0.5}
    assert figures_of("epoch", epoch) == {"train/loss": 1.0, "eval/top1_ema": 2.0, "run/lr": 0.5}
    step = {"step": 7, "epoch": 3, "lr": 0.5, "grad_norm": None, "mean_loss": 1.0, "num_updates": 9, "data_pct": 2.0}
    assert figures_of("step", step) == {"step/lr": 0.5, "time/data": 2.0}


@pytest.mark.long
@pytest.mark.parametrize("place", ["open", "add", "end"])
def test_hanging_tracker_is_dropped_with_one_warning(tmp_path, monkeypatch, place):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    if place == "open":
        # Opening has a longer timeout, because a migration of its store must not be interrupted.
        slow = Fake(open=0.5)
        assert not track(slow, tmp_path).warned and slow.ending
        monkeypatch.setattr(module, "LONGEST_END", 0.2)
    log = track(Fake(**{place: DEADLINE}), tmp_path)
    assert len(log.warned) == 1, "without the timeout it would end without a warning"


@pytest.mark.parametrize("case", cases_of("trackers-states_on_trackers"))
def test_tracker_receives_the_final_state_of_the_run(tmp_path, case):
    status, _, has_failed = case.partition(" after ")
    best = {"top1": 50.0, "epoch": 2, "file": "best.pth"}
    (tmp_path / "status.json").write_text(json.dumps(yaml.safe_load(status) | {"best": best}))
    (tmp_path / "mistakes.png").touch()
    ending = ending_of(tmp_path, bool(has_failed))
    assert ending[1:] == ({"top1": 50.0, "epoch": 2}, [tmp_path / "mistakes.png"])
    assert ending.state == value_of("trackers-states_on_trackers", case)


def test_error_for_missing_tracker_package_names_install_command(tmp_path, monkeypatch):
    config = small_config(tmp_path, "TRACK=mlflow")
    check_trackers(config)
    for found in (None, SimpleNamespace(origin=None)):  # no package, or only a folder of that name
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        with refused(ConfigError, "TRACK", "pip install", "mlflow-skinny"):
            check_trackers(config)
