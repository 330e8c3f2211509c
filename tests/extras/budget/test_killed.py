"""A run with a budget keeps its number of updates after a kill, and stops when its time is nearly up."""

import signal
from pathlib import Path

import pytest

from engine.checkpoint.find import read_checkpoint
from engine.record.saved_files import read_table
from tests.support.runs import run_folder, status_of
from utils.errors import ExitCode

pytestmark = pytest.mark.slow

KILLED = -signal.SIGKILL
FLAGS = ("-epochs", "90", "-opts", "SAVE_STEPS=7", "TRAIN.END_LR=1e-6", "DATA.SYNTHETIC_SIZE=640", "CALIBRATE=false")
BUDGET = ("-budget", "20s", *FLAGS)
STEADY = {"pass_time": [0.1, 0.1, 0], "save_at_once": []}  # 40 updates per epoch, however fast the machine is


def rates_of(folder: Path) -> dict[str, str]:
    """Return the learning rate of each update."""
    return {row["step"]: row["lr"] for row in read_table(folder / "steps.csv")}


@pytest.mark.parametrize(
    "name, flags", [("plain", ()), ("two", ("-batch_size", "4")), ("shards", ("-batch_size", "4"))]
)
@pytest.mark.parametrize("later", [0, 100])
def test_killed_processes_agree_on_the_number_of_updates(tmp_path, start, name, flags, later):
    """Killed before the first update that uses the choice, and later. The processes measure different speeds."""
    flags = [*flags, *BUDGET, *(["DIST.STRATEGY=fsdp2"] if name == "shards" else [])]
    faults = STEADY | {"processes": 1 if name == "plain" else 2}
    ended = start(tmp_path, *flags, **faults, kill_after_choice=[later])
    assert set(ended.codes) == {KILLED}, ended.printed
    folder = run_folder(tmp_path)
    (choice,), rates = read_checkpoint(folder / "last.pth")["progress"]["choices"], rates_of(folder)
    assert choice[0] == 40 and len(rates) == 40 + later
    slower = {"pass_time": [0.1, 0.103, 40]}
    start(tmp_path, *flags, **faults | slower).done()
    saved, rows = read_checkpoint(folder / "last.pth"), read_table(folder / "steps.csv")
    assert saved["progress"]["choices"] == [choice] and saved["step"] == len(rows) == choice[1]
    assert rates_of(folder) | rates == rates_of(folder) and float(rows[-1]["lr"]) == pytest.approx(1e-6, rel=0.01)
    assert 18.4 <= saved["budget"]["used"] <= 20 and status_of(folder)["total_steps"] == saved["step"]
    if later:
        changed = ("RESUME.ALLOW_CHANGED=[GLOBAL_BATCH]", "-accum_iter", "1")
        assert start(tmp_path, *flags, *changed, **faults).returncode == ExitCode.REFUSED


def test_no_update_uses_a_choice_that_is_not_saved(tmp_path, start):
    ended = start(tmp_path, *BUDGET, **STEADY, kill_before=["replace .last.pth.tmp last.pth", 7])
    folder = run_folder(tmp_path)
    before, saved = rates_of(folder), read_checkpoint(folder / "last.pth")
    assert ended.returncode == KILLED and saved["step"] == len(before) == 40 and "choices" not in saved["progress"]
    start(tmp_path, *BUDGET, **STEADY).done()
    assert rates_of(folder) | before == rates_of(folder)


def test_run_that_becomes_slower_stops_in_time_and_completes_with_more(tmp_path, start):
    faults = STEADY | {"pass_time": [0.1, 0.5, 60]}
    start(tmp_path, *BUDGET, **faults).done()
    folder = run_folder(tmp_path)
    status, saved = status_of(folder), read_checkpoint(folder / "last.pth")
    assert (status["state"], status["reason"]) == ("stopped", "time limit") and 18 <= saved["budget"]["used"] <= 20
    ended = start(tmp_path, *BUDGET, **faults)
    while ended.returncode == 0 and status_of(folder)["step"] > saved["step"]:
        saved = read_checkpoint(folder / "last.pth")
        ended = start(tmp_path, *BUDGET, **faults)
    assert ended.returncode == ExitCode.NO_PROGRESS and "TRAIN.BUDGET" in ended.printed
    start(tmp_path, "-budget", "5m", *FLAGS, **faults).done()
    choice, again = saved["progress"]["choices"], read_checkpoint(folder / "last.pth")
    assert again["progress"]["choices"] == choice and again["step"] == choice[0][1]


def test_budget_that_ends_before_the_choice_is_refused(tmp_path, start):
    ended = start(tmp_path, "-budget", "4s", *FLAGS, pass_time=[5, 5, 0], save_at_once=[])
    assert ended.returncode == ExitCode.REFUSED and "-budget" in ended.printed
