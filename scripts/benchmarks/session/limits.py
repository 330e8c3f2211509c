"""Runs a command within a limit of time, and leaves none of its processes behind."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def run_within(command: list[str], seconds: float, stderr: IO, environment: dict[str, str]) -> tuple[str, float]:
    """How the command ended, and after how many seconds."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stderr=stderr, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds)
        outcome = "done" if code == 0 else f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        outcome = f"killed at its limit of {seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_descendants()
    return outcome, time.monotonic() - begin


def adopt_orphans() -> None:
    """Linux: a process whose parent ends becomes a child of this one, wherever it hides: of tests in sessions of their
    own, for example."""
    if sys.platform == "linux":
        set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER
        ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def kill_descendants() -> None:
    """Linux: kill what this process started and what that started, until nothing is left."""
    while running := list(descendants(os.getpid())):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # adopted ones
                pass
        time.sleep(0.02)


def descendants(pid: int) -> Iterator[int]:
    """Its children, their children and so on, without those that have ended."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    waiting = [pid]
    while waiting:
        found = children.get(waiting.pop(), [])
        waiting += found
        yield from found
