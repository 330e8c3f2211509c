"""A run with a budget keeps its number of updates after a kill, and stops when its time is nearly up."""

import signal
from pathlib import Path

import pytest
import torch

from engine.checkpoint.find import read_checkpoint
from engine.record.saved_files import read_table
from tests.support.runs import run_folder, status_of
from utils.errors import ExitCode

pytestmark = pytest.mark.slow

KILLED = -signal.SIGKILL
FLAGS = "-epochs 90 -opts SAVE_STEPS=7 TRAIN.END_LR=1e-6 CALIBRATE=false".split()
FLAGS += ["TRAIN.ACCUM_ITER=1", "DATA.SYNTHETIC_SIZE=160"]
BUDGET = ("-budget", "20s", *FLAGS)
STEADY = {"pass_time": [0.2, 0.2, 0], "save_at_once": []}  # 20 updates per epoch, however fast the machine is


def rates_of(folder: Path) -> dict[str, str]:
    """Return the learning rate of each update."""
    return {row["step"]: row["lr"] for row in read_table(folder / "steps.csv")}


@pytest.mark.long
@pytest.mark.parametrize("name, later", [("plain", 0), ("two", 50), ("shards", 0)])
def test_killed_processes_agree_on_the_number_of_updates(tmp_path, start, name, later):
    """Killed before the first update that uses the choice, and later. The processes measure different speeds."""
    flags = [] if name == "plain" else ["-batch_size", "4"]
    flags += [*BUDGET, *(["DIST.STRATEGY=fsdp2"] if name == "shards" else [])]
    faults = STEADY | {"processes": 1 if name == "plain" else 2}
    ended = start(tmp_path, *flags, **faults, kill_after_choice=[later])
    assert set(ended.codes) == {KILLED}, ended.printed
    folder = run_folder(tmp_path)
    (choice,), rates = read_checkpoint(folder / "last.pth")["progress"]["choices"], rates_of(folder)
    assert choice[0] == 20 and len(rates) == 20 + later
    slower = {"pass_time": [0.2, 0.206, 20]}
    start(tmp_path, *flags, **faults | slower).done()
    saved, rows = read_checkpoint(folder / "last.pth"), read_table(folder / "steps.csv")
    assert saved["progress"]["choices"] == [choice] and saved["step"] == len(rows) == choice[1]
    assert rates_of(folder) | rates == rates_of(folder) and float(rows[-1]["lr"]) == pytest.approx(1e-6, rel=0.01)
    assert 18.4 <= saved["budget"]["used"] <= 20 and status_of(folder)["total_steps"] == saved["step"]
    if later:
        changed = ("RESUME.ALLOW_CHANGED=[GLOBAL_BATCH]", "-accum_iter", "2")
        assert start(tmp_path, *flags, *changed, **faults).returncode == ExitCode.REFUSED


@pytest.mark.long
def test_killed_run_keeps_its_raised_number_of_updates_and_its_bits(tmp_path, start):
    flags = [*BUDGET[:2], "-batch_size", "4", *FLAGS]
    faults = STEADY | {"processes": 2, "pass_time": [0.4, 0.1, 21]}
    start(tmp_path / "whole", *flags, **faults).done()
    whole = read_checkpoint(run_folder(tmp_path / "whole") / "last.pth")
    (first, fewer), *_, (last, more) = whole["progress"]["choices"]
    ended = start(tmp_path / "killed", *flags, **faults, kill_after_choice=[last + 3 - first])
    assert set(ended.codes) == {KILLED} and more > 1.2 * fewer, ended.printed
    start(tmp_path / "killed", *flags, **faults | {"pass_time": [0.05, 0.05, 0]}).done()
    again = read_checkpoint(run_folder(tmp_path / "killed") / "last.pth")
    assert again["progress"]["choices"] == whole["progress"]["choices"] and again["step"] == more
    assert all(torch.equal(tensor, again["state_dict"][name]) for name, tensor in whole["state_dict"].items())


@pytest.mark.long
def test_no_update_uses_a_choice_that_is_not_saved(tmp_path, start):
    ended = start(tmp_path, *BUDGET, **STEADY, kill_before=["replace .last.pth.tmp last.pth", 4])
    folder = run_folder(tmp_path)
    before, saved = rates_of(folder), read_checkpoint(folder / "last.pth")
    assert ended.returncode == KILLED and saved["step"] == len(before) == 20 and "choices" not in saved["progress"]
    start(tmp_path, *BUDGET, **STEADY).done()
    assert rates_of(folder) | before == rates_of(folder)


@pytest.mark.long
@pytest.mark.parametrize("slower, processes", [(0.3, 1), (1.0, 1), (1.0, 2)])
def test_run_that_becomes_slower_ends_in_time_at_the_final_rate(tmp_path, start, slower, processes):
    flags = [*BUDGET[:2], "-batch_size", str(8 // processes), *FLAGS]
    start(tmp_path, *flags, **STEADY | {"pass_time": [0.2, slower, 30]}, processes=processes).done()
    folder = run_folder(tmp_path)
    status, saved = status_of(folder), read_checkpoint(folder / "last.pth")
    choices, rows = saved["progress"]["choices"], read_table(folder / "steps.csv")
    assert status["state"] == "done" and 17 <= saved["budget"]["used"] <= 20, choices
    assert choices[-1][1] == saved["step"] < choices[0][1] and float(rows[-1]["lr"]) == pytest.approx(1e-6, rel=0.01)


@pytest.mark.long
def test_run_without_time_stops_and_completes_with_more(tmp_path, start):
    start(tmp_path, *BUDGET, **STEADY, kill_after_choice=[25])
    folder, faults = run_folder(tmp_path), STEADY
    saved = read_checkpoint(folder / "last.pth")
    ended = start(tmp_path, "-budget", "5s", *FLAGS, **STEADY)
    assert ended.returncode == ExitCode.NO_PROGRESS and "TRAIN.BUDGET" in ended.printed
    start(tmp_path, "-budget", "5m", *FLAGS, **faults).done()
    choice, again = saved["progress"]["choices"], read_checkpoint(folder / "last.pth")
    assert again["progress"]["choices"] == choice and again["step"] == choice[0][1]


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("seconds, budget", [(5, "4s"), (0.2, "5s")])
def test_too_short_budget_is_refused_and_leaves_no_folder(tmp_path, start, processes, seconds, budget):
    """The budget ends in the first update, or is too short for an epoch of 20 updates and the decay."""
    flags = ["-budget", budget, *FLAGS[:2], "-batch_size", str(8 // processes), "-name", "a"]
    options = ["-opts", "SAVE_STEPS=30", *FLAGS[4:]]
    ended = start(tmp_path / "new", *flags, *options, processes=processes, pass_time=[seconds, seconds, 0])
    assert set(ended.codes) == {ExitCode.REFUSED} and "-budget" in ended.printed
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_folder_with_a_checkpoint_stays_when_its_budget_is_too_short(tmp_path, start):
    """Every 7 updates and each epoch are saved, and a start is refused after 13. The second continues the first."""
    for saved in (7, 20):
        ended = start(tmp_path, "-budget", "5s", *FLAGS, **STEADY)
        assert ended.returncode == ExitCode.REFUSED and "-budget" in ended.printed
        assert read_checkpoint(run_folder(tmp_path) / "last.pth")["step"] == saved
    start(tmp_path, *BUDGET, **STEADY).done()


def test_folder_of_an_earlier_start_stays_without_a_checkpoint(tmp_path, start):
    words = ("-name", "a", "-epochs", "90", "-opts", "DATA.SYNTHETIC_SIZE=640")
    started = start(tmp_path, "-budget", "20s", *words, **STEADY, signal_at=[3, signal.SIGKILL, [0]])
    assert started.returncode == KILLED
    ended = start(tmp_path, "-budget", "5s", *words, **STEADY)
    assert ended.returncode == ExitCode.REFUSED and status_of(tmp_path / "a")["state"] == "failed"
