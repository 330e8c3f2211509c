"""status.json: it is correct in every state, and it does not slow down training."""

import errno
import json
import re
import signal
import threading
import time
from unittest.mock import Mock

import pytest

from engine import session
from engine.session import Session
from tests.support.configs import CPU, SMALL, load_text
from tests.support.runs import run_folder, status_of
from utils.distributed import Process

pytestmark = pytest.mark.slow


def contents(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_status_is_complete_in_every_state(tmp_path, start):
    kept = tmp_path / "kept"
    fast = ["-opts", "SAVE_STEPS=1", "PRECISION.MAX_CONSECUTIVE_SKIPS=2"]
    ends = {
        "done": {},
        "stopped": {"signal_at": [3, signal.SIGTERM, [0]]},
        "non-finite": {"poison": ["input", [0], list(range(3, 8))]},
        "failed": {"break_update": [3]},
        "save_failed": {"find_no_room": ["open .last.pth.tmp", 8, False]},
    }
    for name, faults in ends.items():
        ended = start(tmp_path / name, *fast, keep_statuses=[str(kept)], **faults)
        assert contents(kept)[-1]["exit_code"] == ended.returncode, ended.printed
    weights = run_folder(tmp_path / "done") / "best.pth"
    assert start(tmp_path / "eval", "-eval", "-resume", str(weights), keep_statuses=[str(kept)]).returncode == 0
    assert start(tmp_path / "again", "-pretrained", str(weights), keep_statuses=[str(kept)]).returncode == 0
    written = contents(kept)
    assert [each["state"] for each in written[:2]] == ["starting", "training"]
    ends = {"done", "stopped", "failed", "save_failed"}
    assert {each["state"] for each in written} == {"starting", "training", "evaluating"} | ends
    for each in written:
        assert {"version", "state", "time", "heartbeat", "started", "host", "pid"} <= set(each)
        assert all(re.search(r":\d\d[+-]\d\d:\d\d$", each[key]) for key in ("time", "heartbeat", "started")), "RFC 3339"
        assert "eta_seconds" not in each or each["state"] in ("training", "evaluating")
        assert ("exit_code" in each) == (each["state"] not in ("starting", "training", "evaluating"))
    positions = [each["position"]["step"] for each in written if each["state"] == "training"]
    assert set(range(1, 8)) <= set(positions), "each report must write status.json"
    of_done = [each for each in written if each["state"] == "done" and "step" in each]
    assert [(each["epoch"], each["step"], each["total_steps"]) for each in of_done] == [(2, 8, 8)] * 2


@pytest.mark.long
def test_refused_resume_leaves_killed_runs_status_unchanged(tmp_path, start):
    assert start(tmp_path, kill_at=[2, 0]).returncode == -signal.SIGKILL
    path = run_folder(tmp_path) / "status.json"
    before = path.read_bytes()
    assert start(tmp_path, "-opts", "TRAIN.BASE_LR=0.5").returncode == 2
    assert path.read_bytes() == before and json.loads(before)["state"] == "training"


@pytest.fixture
def opened(here) -> Session:
    """Return a session in an open folder."""
    opened = Session(load_text(SMALL, "-output", "o"), Process(CPU))
    opened.open_folder("train")
    return opened


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Return the time of the monotonic clock, which a test may change."""
    clock = [1e9]
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    return clock


def test_heartbeat_is_rate_limited_and_never_delays_training(clock, opened, monkeypatch):
    disk, write, written = threading.Event(), session.write_text, []

    def slow_write(path, text, *check):
        written.append(json.loads(text))
        assert disk.wait(60)
        write(path, text, *check)

    monkeypatch.setattr(session, "write_text", slow_write)
    opened.beat(position=1)
    assert written == []
    clock[0] += 10.0
    opened.beat(position=2)
    clock[0] += 15.0
    opened.beat(position=3)  # the write before is still in progress
    disk.set()
    opened.status("done")
    assert [each.get("position") for each in written] == [2, 2] and written[-1]["state"] == "done"
    clock[0] += 9.0
    opened.beat(position=4)
    opened.status("done", position=None)
    assert "position" not in status_of(opened.path) and len(written) == 3


@pytest.mark.long
def test_heartbeat_keeps_the_time_of_the_state(clock, opened, monkeypatch):
    monkeypatch.setattr(session, "now", map(str, range(9)).__next__)
    opened.status("training")
    before = status_of(opened.path)
    clock[0] += 10.0
    opened.beat(step=5)
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(1)
    after = status_of(opened.path)
    assert after["step"] == 5 and after["time"] == before["time"] and after["heartbeat"] != before["heartbeat"]


def test_unwritable_status_file_is_a_warning_with_its_content(opened, monkeypatch, capsys):
    monkeypatch.setattr(session, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "planted")))
    opened.status("stopped")
    warning = capsys.readouterr().out
    assert "warning" in warning and "stopped" in warning and str(opened.path / "status.json") in warning


def test_late_heartbeat_does_not_overwrite_final_state(clock, opened, monkeypatch):
    run = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda thread: time.sleep(0.2) or run(thread))
    clock[0] += 10.0
    opened.beat(step=5)
    opened.status("done", step=9)
    time.sleep(0.4)
    facts = status_of(opened.path)
    assert (facts["state"], facts["step"]) == ("done", 9)


def test_state_is_written_while_a_heartbeat_starts(clock, opened, monkeypatch):
    """The thread that writes checkpoints may do so at any moment."""

    class Starting(threading.Thread):
        ident = 1  # as a thread has it shortly before it counts as started

        def start(self) -> None:
            opened.status("training", step=3)
            super().start()

    monkeypatch.setattr(session.threading, "Thread", Starting)
    clock[0] += 10.0
    opened.beat(position=4)
    opened.status("done")
    facts = status_of(opened.path)
    assert (facts["state"], facts["step"], facts["position"]) == ("done", 3, 4)
