"""kill_runs.py in its smallest form, and the faults that it must detect."""

import contextlib

import pytest

from tests.kill import kill_harness, kill_runs
from tests.kill.kill_harness import (
    EPOCH,
    EVALUATION,
    EXIT,
    SAVE,
    START_UP,
    KilledRun,
    Outcome,
    PlannedKill,
    StartMethod,
    classify_phase,
)
from tests.support.runs import alive, wait_until

STEP, LAST_STEP, SCORES = (
    "2026-01-02 03:04:05 Epoch[001/002], Step[0020/0044], Lr",
    "2026-01-02 03:04:06 Epoch[001/002], Step[0043/0044], Lr",
    "2026-01-02 03:04:07 ----- Epoch[001",
)


def cell(text: str, column: str) -> str:
    heads, _, row = ([each.strip() for each in line.split("|")] for line in text.splitlines() if line.startswith("|"))
    return row[heads.index(column)]


def test_a_killed_run_ends_with_the_hash_of_an_uninterrupted_one_and_another_hash_is_reported(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(kill_runs, "EPOCHS", 1)
    monkeypatch.setattr(kill_runs.tempfile, "TemporaryDirectory", lambda prefix: contextlib.nullcontext(str(tmp_path)))
    real, seen = kill_runs.kill_runs, []
    monkeypatch.setattr(kill_runs, "kill_runs", lambda *words: seen.extend(real(*words)) or seen)
    flags = ["-kills", "1", "-processes", "1", "-seed", "1"]
    code = kill_runs.main([*flags, "-output", str(tmp_path / "table.md")])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert (cell(said.out, "kills"), cell(said.out, "lost"), cell(said.out, "other hash")) == ("1", "0", "0")
    assert (tmp_path / "table.md").read_text() == said.out
    ((_, _, found),) = seen
    metrics = found[-1].folder / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("train_loss", "train_lost", 1))
    monkeypatch.setattr(kill_runs, "kill_runs", lambda *words: seen)
    assert kill_runs.main(flags) == 1
    said = capsys.readouterr()
    assert cell(said.out, "other hash") == "1" and f"ANOTHER HASH: {metrics.parent}" in said.err


@pytest.mark.parametrize(
    ("status", "is_writing", "said", "place"),
    [
        ({}, False, "", START_UP),
        ({"pid": 6, "state": "training"}, True, STEP, START_UP),  # what an earlier start left
        ({"pid": 7, "state": "starting"}, False, "", START_UP),
        ({"pid": 7, "state": "training"}, False, "", EPOCH),
        ({"pid": 7, "state": "training"}, False, STEP, EPOCH),
        ({"pid": 7, "state": "training"}, True, STEP, SAVE),
        ({"pid": 7, "state": "training"}, False, f"{STEP}\n{LAST_STEP}", EVALUATION),
        ({"pid": 7, "state": "training"}, False, f"{LAST_STEP}\n{SCORES}", EPOCH),
        ({"pid": 7, "state": "done"}, True, LAST_STEP, EXIT),
    ],
)
def test_the_phase_at_a_kill_follows_from_the_files(status, is_writing, said, place):
    assert classify_phase(status, [7], is_writing, said) == place


def kill_program(tmp_path, program: str, max_kills: int = 0, waits_for_save: bool = False) -> Outcome:
    """Kill a Python program instead of a training run; it finds its output folder in `folder`."""
    head = "import json, os, pathlib, subprocess, sys, time; folder = pathlib.Path(sys.argv[4])\n"
    run = KilledRun(StartMethod("program", ("-c", head + program), 1), tmp_path / "none.yaml", tmp_path / "o")
    return run.kill_and_resume(lambda number: PlannedKill(0.0 if waits_for_save else 0.5, 0, waits_for_save), max_kills)


def test_a_run_that_fails_by_itself_is_lost_and_its_last_lines_are_printed(tmp_path):
    assert kill_program(tmp_path, "sys.exit('no room')").lost == "it ended with exit code 1, and not by a kill\nno room"


def test_a_run_that_started_over_is_lost(tmp_path):
    program = "for name in 'ab': (folder / f'train-{name}').mkdir(); (folder / f'train-{name}/last.pth').touch()"
    assert "it started over: 2 folders" in kill_program(tmp_path, program).lost


def test_a_run_that_resumes_from_an_older_step_than_was_saved_is_lost(tmp_path):
    program = """
step = 3 if (folder / "train-a").exists() else 5
(folder / "train-a").mkdir(exist_ok=True)
(folder / "train-a/log.txt").touch()
(folder / "train-a/status.json").write_text(json.dumps({"pid": os.getpid(), "state": "training", "step": step}))
time.sleep(60)
"""
    found = kill_program(tmp_path, program, max_kills=9)
    assert found.lost == "it resumed from step 3, but step 5 was saved" and found.phases[-1] == EPOCH


def test_a_process_that_a_run_leaves_behind_is_counted_and_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_harness, "ORPHAN_TIMEOUT", 0.1)
    program = "child = subprocess.Popen(['sleep', '60']); (folder / 'child').write_text(str(child.pid))"
    assert kill_program(tmp_path, program).orphans == 1
    wait_until(lambda: not alive(int((tmp_path / "o/child").read_text())))


def test_a_kill_that_waits_for_a_save_hits_it_and_is_reported_as_such(tmp_path):
    program = """
run = folder / "train-a"
if run.exists():
    sys.exit((run / "last.pth").touch())
run.mkdir()
(run / "log.txt").touch()
(run / "new").write_text(json.dumps({"pid": os.getpid(), "state": "training", "step": 5}))
(run / "new").rename(run / "status.json")
(run / ".last.pth.tmp").touch()
time.sleep(60)
"""
    found = kill_program(tmp_path, program, max_kills=1, waits_for_save=True)
    assert (found.lost, found.phases, found.aimed) == ("", [SAVE], [SAVE])
    row, is_wrong = kill_runs.judge(
        StartMethod("way", (), 1), "", [Outcome(found.phases + [EPOCH], found.aimed + [EPOCH], lost="so")]
    )
    told = dict(zip(kill_runs.COLUMNS, row, strict=True))
    assert is_wrong and (
        told["kills"],
        told["in a save"],
        told["aimed at a save"],
        told["of these in a save"],
    ) == tuple("2121")


def test_quick_may_be_written_with_one_dash_or_two():
    assert kill_runs.parse(["-quick"]).quick and kill_runs.parse(["--quick"]).quick and not kill_runs.parse([]).quick
