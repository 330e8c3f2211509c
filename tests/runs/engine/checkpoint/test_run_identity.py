"""The newest of several runs is the run with the last save in UTC, whatever its folder, file dates and copies."""

import json
import os
import shutil
import signal
from datetime import datetime
from pathlib import Path

import pytest

from engine.checkpoint.find import read_checkpoint
from tests.support.runs import Ended, epochs_of, run, run_folder, status_of, typed
from utils.runs import newest_first

pytestmark = pytest.mark.slow


def start(output: Path, *words: str, **faults: list) -> Ended:
    """Run the small settings, in epochs of 4 updates."""
    words = ["-cfg", str(output.parent / "small.yaml"), "-output", str(output), *words]
    return typed("main_single_gpu.py", *words, faults={"draw_nothing": []} | faults)


@pytest.fixture
def output(tmp_path, small_yaml) -> Path:
    text = small_yaml.read_text().replace("BATCH_SIZE: 32", "BATCH_SIZE: 80")
    (tmp_path / "small.yaml").write_text(text)
    return tmp_path / "o"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_resume_auto_prefers_the_original_name_to_an_equal_copy(output):
    start(output, "-epochs", "1").done()
    run_itself = run_folder(output)
    copy = shutil.copytree(run_itself, output / f"{run_itself.name}-backup")
    before = contents(copy)
    start(output, "-resume", "auto", "-epochs", "2").done()
    assert len(epochs_of(run_itself)) == 2 and contents(copy) == before


@pytest.mark.long
def test_runs_across_time_zones_are_ordered_by_utc(output):
    """Shanghai's clock is 8 hours ahead of UTC, so its folder has the later date."""
    start(output, "-epochs", "1", set_time_zone=["Asia/Shanghai"]).done()
    finished = run_folder(output)
    killed_at = {"signal_at": [5, signal.SIGKILL, [0]]}
    start(output, "-epochs", "2", set_time_zone=["UTC"], **killed_at, save_at_once=[])
    (killed,) = set(output.iterdir()) - {finished}
    assert killed.name < finished.name
    os.utime(finished / "config.yaml")  # a date that `latest` must not compare
    before = contents(finished)
    for word in ("auto", "latest"):
        checked = start(output, "-resume", word, "-epochs", "2", "-check", "-check_images", "10")
        assert str(killed) in checked.stdout and str(finished) not in checked.stdout, checked.printed
    start(output, "-resume", "auto", "-epochs", "2", set_time_zone=["Asia/Shanghai"]).done()
    assert contents(finished) == before
    assert status_of(killed)["state"] == "done" and len(epochs_of(killed)) == 2


def make_copy(folder: Path, **status) -> Path:
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").touch()
    return folder


def record(name: str, saved: str, run_id: str = "") -> dict[str, str]:
    return {"id": run_id or name, "name": name, "began": "2026-01-01T00:00:00+00:00", "saved": saved}


EARLY, LATE = "2026-01-02T03:00:00+00:00", "2026-01-02T05:00:00+02:00"  # the same moment
# {criterion: {folder: its status.json}, newest first}
ORDERS = {
    "by the time of the last save": {
        "a": {"run": record("a", "2026-01-02T03:00:00.5+00:00")},
        "b": {"run": record("b", EARLY)},
    },
    "then by the original name": {"a": {"run": record("a", LATE)}, "b": {"run": record("a", EARLY)}},
    "a copy with a later save": {
        "b": {"run": record("a", "2026-01-03T00:00:00+00:00")},
        "a": {"run": record("a", EARLY)},
    },
    "damaged": {"a": {"run": record("a", "2999-01-01T00:00:00+00:00")}, "b": {"run": 1, "time": 5}},
}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize("turn", [1, -1])
def test_runs_are_sorted_newest_first(tmp_path, case, turn):
    folders = [make_copy(tmp_path / name, **status) for name, status in ORDERS[case].items()]
    assert newest_first(folders[::turn]) == folders


@pytest.mark.parametrize("status", [None, "", '{"version": 1, "sta'], ids=["missing", "empty", "damaged"])
def test_run_without_status_is_ordered_by_date_of_its_files(tmp_path, status):
    known, other = make_copy(tmp_path / "a", run=record("a", EARLY)), make_copy(tmp_path / "b")
    (other / "status.json").unlink() if status is None else (other / "status.json").write_text(status)
    moment = datetime.fromisoformat(EARLY).timestamp()
    for day, first in ((-1, known), (1, other)):
        os.utime(other / "config.yaml", (0, moment + day * 86400))
        assert newest_first([known, other])[0] == first


@pytest.mark.long
def test_run_identity_survives_resume_and_differs_between_runs(output):
    start(output, "-epochs", "1").done()
    folder = run_folder(output)
    began = status_of(folder)["run"]
    assert began == read_checkpoint(folder / "last.pth")["run"] and began["name"] == folder.name
    moved = folder.rename(output / "renamed")
    start(output, "-resume", str(moved), "-epochs", "2").done()
    went_on = status_of(moved)["run"]
    assert went_on["saved"] > began["saved"]
    assert {**went_on, "saved": ""} == {**began, "saved": ""}
    start(output, "-resume", str(moved), "-epochs", "2").done()
    assert status_of(moved)["run"] == went_on, "a finished run must not be saved again"
    weights = moved.with_name("last.pth")
    (moved / "last.pth").rename(weights)
    other = output.with_name("other")
    start(other, "-resume", str(weights), "-epochs", "3").done()
    assert status_of(run_folder(other))["run"]["id"] != began["id"]


def test_resume_auto_names_a_newer_unfinished_run_with_a_name(output):
    start(output, "-epochs", "1").done()
    killed_at = {"signal_at": [5, signal.SIGKILL, [0]]}
    start(output, "-epochs", "2", "-name", "mine", **killed_at, save_at_once=[])
    found = start(output, "-resume", "auto", "-epochs", "1").done()
    assert "already finished" in found.stdout and f"-resume {output / 'mine'}" in found.printed
    shutil.rmtree(next(output.glob("train-*")))
    run("main_single_gpu.py", "-resume", "auto", "-output", str(output)).refused(f"-resume {output / 'mine'}")
    start(output, "-name", "mine", "-resume", "auto", "-epochs", "2").done()
    again = run("main_single_gpu.py", "-resume", "auto", "-output", str(output)).refused("there is no run to continue")
    assert "mine" not in again.printed


@pytest.mark.long
def test_resume_auto_without_settings_file_starts_from_pretrained_weights(output):
    start(output, "-epochs", "1").done()
    weights = run_folder(output) / "best.pth"
    words = ["-pretrained", str(weights), "-output", str(output), "-name", "more", "-resume", "auto"]
    assert "1 epoch" in typed("main_single_gpu.py", *words, faults={"draw_nothing": []}).done().stdout
    assert "already finished" in run("main_single_gpu.py", *words).done().stdout
