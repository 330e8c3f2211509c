"""The newest of several runs is the run with the last save in UTC, whatever its folder, file dates and copies."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from engine.checkpoint.find import read_checkpoint
from tests.support.refusals import assert_names
from tests.support.runs import Ended, epochs_of, run, run_folder, status_of
from utils.run_copies import newest_first, other_copies

pytestmark = pytest.mark.slow


def start(output: Path, *words: str, **faults: list) -> Ended:
    """Run the small settings, in epochs of 4 updates."""
    words = ["-cfg", str(output.parent / "small.yaml"), "-output", str(output), *words]
    return run("main_single_gpu.py", *words, faults={"draw_nothing": []} | faults)


@pytest.fixture
def output(tmp_path, small_yaml) -> Path:
    text = small_yaml.read_text().replace("BATCH_SIZE: 32", "BATCH_SIZE: 320")
    (tmp_path / "small.yaml").write_text(text)
    return tmp_path / "o"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("goes_on_first", [True, False], ids=["behind", "equal"])
def test_resume_auto_ignores_copies_of_a_run(output, goes_on_first):
    start(output, "-epochs", "1").done()
    run_itself = run_folder(output)
    copy = shutil.copytree(run_itself, output / f"{run_itself.name}-backup")
    if goes_on_first:
        start(output, "-resume", str(run_itself), "-epochs", "2").done()
    before = contents(copy)
    ended = start(output, "-resume", "auto", "-epochs", "3").done()
    assert len(epochs_of(run_itself)) == 3 and contents(copy) == before
    assert_names(ended.stdout, copy, "another copy")


def test_runs_across_time_zones_are_ordered_by_utc(output):
    """Shanghai's clock is 8 hours ahead of UTC, so its folder has the later date."""
    start(output, "-epochs", "1", set_time_zone=["Asia/Shanghai"]).done()
    finished = run_folder(output)
    killed_at = {"signal_at": [5, signal.SIGKILL, [0]]}
    start(output, "-epochs", "2", set_time_zone=["UTC"], **killed_at, save_at_once=[])
    (killed,) = set(output.iterdir()) - {finished}
    assert killed.name < finished.name
    os.utime(finished / "config.yaml")  # a date that older versions of `latest` compared
    before = contents(finished)
    for word in ("auto", "latest"):
        checked = start(output, "-resume", word, "-epochs", "2", "-check")
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
        "b": {"run": record("b", "2026-01-02T03:00:00.5+00:00"), "step": 1},
        "a": {"run": record("a", EARLY), "step": 9},
    },
    "then by the step": {"a": {"run": record("a", LATE), "step": 9}, "b": {"run": record("b", EARLY), "step": 1}},
    "of copies the one with the run's own name": {
        "b": {"run": record("b", EARLY), "step": 1},
        "a": {"run": record("b", "2026-01-03T00:00:00+00:00"), "step": 9},
        "c": {"run": record("c", "2026-01-01T00:00:00+00:00"), "step": 9},
    },
    "of renamed copies by the time": {
        "y": {"run": record("b", "2026-01-03T00:00:00+00:00"), "step": 1},
        "x": {"run": record("b", EARLY), "step": 9},
    },
    "without a time by the name": {"train-20260103-00-00-00.10": {}, "train-20260103-00-00-00.9": {}},
    "damaged": {"a": {"run": record("a", EARLY)}, "train-20260101-00-00-00": {"run": 1, "time": 5, "step": "x"}},
}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize("turn", [1, -1])
def test_copies_of_a_run_are_sorted_newest_first(tmp_path, case, turn):
    folders = [make_copy(tmp_path / name, **status) for name, status in ORDERS[case].items()]
    assert [copy.folder for copy in newest_first(folders[::turn])] == folders


@pytest.mark.parametrize("status", [None, "", '{"version": 1, "sta'], ids=["missing", "empty", "damaged"])
def test_original_run_without_status_precedes_its_copy(tmp_path, status):
    name = "train-20260101-00-00-00"
    original, copy = tmp_path / name, make_copy(tmp_path / f"{name}-backup", run=record(name, EARLY), step=9)
    make_copy(original)
    older = make_copy(tmp_path / "train-20260101-12-00-00", run=record("other", "2026-01-01T12:00:00+00:00"))
    (original / "status.json").unlink() if status is None else (original / "status.json").write_text(status)
    assert [each.folder for each in newest_first([copy, older, original])] == [original, copy, older]
    for folder in (original, copy):
        (folder / "last.pth").touch()
    assert [each.folder for each in other_copies(original)] == [copy]


def test_run_with_the_original_name_precedes_copies_without_status(tmp_path):
    original = make_copy(tmp_path / "train-20260101-00-00-00")
    copies = [make_copy(tmp_path / f"{original.name}{end}") for end in ("-backup", "-copy")]
    assert newest_first([*copies, original])[0].folder == original


def test_resume_auto_prefers_original_run_without_status_over_its_copy(output):
    start(output, "-epochs", "1").done()
    original = run_folder(output)
    copy = shutil.copytree(original, output / f"{original.name}-backup")
    (original / "status.json").unlink()
    before = contents(copy)
    ended = start(output, "-resume", "auto", "-epochs", "2").done()
    assert len(epochs_of(original)) == 2 and contents(copy) == before
    assert_names(ended.stdout, copy, "another copy")


def test_run_folder_without_date_is_ordered_by_date_of_settings_file(tmp_path):
    dated, plain = make_copy(tmp_path / "train-20260102-00-00-00"), make_copy(tmp_path / "plain")
    (plain / "status.json").write_text("{")
    moment = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, -1))
    for day, first in ((0, dated), (2, plain)):
        os.utime(plain / "config.yaml", (0, moment + day * 86400))
        assert newest_first([dated, plain])[0].folder == first


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
