"""A killed run with a budget repeats its earlier choices."""

import functools
import json
import signal
from pathlib import Path

import pytest

from engine.checkpoint.find import read_checkpoint
from engine.record.saved_files import read_table
from tests.support.runs import run_folder, status_of

pytestmark = pytest.mark.slow

KILLED = -signal.SIGKILL
BUDGET = ("-budget", "10s", "-epochs", "90", "-opts", "SAVE_STEPS=7", "TRAIN.END_LR=1e-6", "DATA.SYNTHETIC_SIZE=640")
STEADY = {"pass_time": [0.1, 0.2, 30], "save_at_once": []}  # 40 updates per epoch, however fast the machine is


def rates_of(folder: Path) -> dict[str, str]:
    """Return the learning rate of each update."""
    return {row["step"]: row["lr"] for row in read_table(folder / "steps.csv")}


def recorded(folder: Path) -> list[list[int]]:
    """Return the choices of a budget on the disk."""
    return json.loads((folder / "budget.json").read_text())["choices"]


@pytest.mark.parametrize(
    ("name", "flags"), [("plain", ()), ("two", ("-batch_size", "4")), ("shards", ("-batch_size", "4"))]
)
def test_killed_processes_agree_on_saved_budget_choices(tmp_path, start, name, flags):
    """Killed before an update uses the first choice, and after one used the second. All processes must repeat the rates."""
    flags = [*flags, *BUDGET, *(["DIST.STRATEGY=fsdp2"] if name == "shards" else [])]
    faults, rates = STEADY | {"processes": 1 if name == "plain" else 2}, {}
    for nth, later in ((1, 0), (2, 1)):
        ended = start(tmp_path, *flags, **faults, kill_at_choice=[nth, later])
        assert set(ended.codes) == {KILLED}, ended.printed
        folder = run_folder(tmp_path)
        choices, saved = recorded(folder), read_checkpoint(folder / "last.pth")
        assert len(choices) == nth and saved["progress"].get("choices", []) == choices[:-1]
        assert saved["step"] <= choices[-1][0]
        rates |= rates_of(folder)
    ended = start(tmp_path, *flags, **faults).done()
    saved, rows = read_checkpoint(folder / "last.pth"), read_table(folder / "steps.csv")
    number, made = saved["step"], saved["progress"]["choices"]
    assert rates_of(folder) | rates == rates_of(folder) and len(rates) > 30
    assert made[:2] == choices and made == recorded(folder) and saved["budget"]["used"] <= 10
    assert made[-1][1] == number == len(rows) and float(rows[-1]["lr"]) == pytest.approx(1e-6, rel=0.01)
    assert all(float(rows[step]["num_updates"]) == chosen for step, chosen in made)
    assert status_of(folder)["total_steps"] == number and "train longer" not in ended.stdout
    other = start(tmp_path, *flags, "RESUME.ALLOW_CHANGED=[GLOBAL_BATCH]", "-accum_iter", "1", **faults)
    other.refused("TRAIN.BUDGET", "-pretrained")


@pytest.mark.parametrize("operation", ["open .budget.json.tmp", "replace .budget.json.tmp budget.json"])
def test_no_update_uses_an_unsaved_budget_choice(tmp_path, start, operation):
    ended = start(tmp_path, *BUDGET, **STEADY, kill_before=[operation, 2])  # the first write is at the start
    folder = run_folder(tmp_path)
    before = rates_of(folder)
    assert ended.returncode == KILLED and recorded(folder) == [] and len(before) == 13
    start(tmp_path, *BUDGET, **STEADY).done()
    assert rates_of(folder) | before == rates_of(folder)


def test_new_start_in_same_folder_ignores_old_budget_choices(tmp_path, start):
    again = functools.partial(start, tmp_path, "-name", "exp", *BUDGET, **STEADY, signal_at=[2, signal.SIGKILL, [0]])
    path = tmp_path / "exp" / "budget.json"
    assert again().returncode == KILLED
    path.write_text(json.dumps(json.loads(path.read_text()) | {"choices": [[1, 50]]}))
    assert again().returncode == KILLED and recorded(tmp_path / "exp") == []


def test_full_disk_causes_a_warning_but_budget_choice_still_applies(tmp_path, start):
    ended = start(tmp_path, *BUDGET, **STEADY, find_no_room=["open .budget.json.tmp", 2, False]).done()
    folder = run_folder(tmp_path)
    assert f"warning: cannot write {folder / 'budget.json'} (disk full" in ended.printed
    saved = read_checkpoint(folder / "last.pth")
    assert saved["budget"]["used"] <= 10 and saved["progress"]["choices"] == recorded(folder)
