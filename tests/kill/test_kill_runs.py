"""The faults that kill_runs.py must detect; scripts/test.sh runs the program itself."""

import pytest

from tests.kill import kill_runs
from tests.kill.kill_runs import KilledRun, Outcome, StartMethod
from tests.support.runs import alive, wait_until

pytestmark = pytest.mark.slow

HEAD = "import json, os, pathlib, subprocess, sys, time; folder = pathlib.Path(sys.argv[2])\n"
OLDER = """
step = 3 if (folder / "train-a").exists() else 5
(folder / "train-a").mkdir(exist_ok=True)
written = folder / "train-a/status.json.part"  # renamed when it is complete, because another process reads it
written.write_text(json.dumps({"pid": os.getpid(), "state": "training", "step": step}))
written.rename(folder / "train-a/status.json")
time.sleep(60)
"""


def kill_program(tmp_path, program: str, max_kills: int = 0) -> Outcome:
    """Kill a Python program instead of a training run. The program has its output folder in `folder`."""
    run = KilledRun(StartMethod("program", ("-c", HEAD + program), 1), [], tmp_path / "o")
    return run.kill_and_resume(lambda: (0.5, 0), max_kills)


@pytest.mark.parametrize(
    ("program", "kills", "why"),
    [
        ("sys.exit('no room')", 0, "it ended with exit code 1, and not by a kill\nno room"),
        (
            "for name in 'ab': (folder / f'train-{name}').mkdir(); (folder / f'train-{name}/last.pth').touch()",
            0,
            "it started over: 2 folders with checkpoints",
        ),
        (OLDER, 9, "it resumed from step 3, but step 5 was saved"),
    ],
)
def test_kill_test_counts_failed_or_restarted_run_as_lost(tmp_path, program, kills, why):
    assert kill_program(tmp_path, program, kills).lost.startswith(why)


def test_kill_test_counts_and_kills_orphaned_process(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_runs, "ORPHAN_TIMEOUT", 0.1)
    program = "child = subprocess.Popen(['sleep', '60']); (folder / 'child').write_text(str(child.pid))"
    assert kill_program(tmp_path, program).orphans == 1
    wait_until(lambda: not alive(int((tmp_path / "o/child").read_text())))


def test_kill_test_reports_wrong_hash_lost_run_or_orphan(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_runs, "hash_of", lambda outcome: outcome.folder.name)
    right, method = Outcome(folder=tmp_path / "same"), StartMethod("way", (), 1)
    assert kill_runs.judge(method, "same", [right])[1] is False
    for wrong in (Outcome(folder=tmp_path / "other"), Outcome(lost="so"), Outcome(folder=right.folder, orphans=1)):
        row, is_wrong = kill_runs.judge(method, "same", [right, wrong])
        assert is_wrong and dict(zip(kill_runs.COLUMNS, row, strict=True))["runs"] == "2"
