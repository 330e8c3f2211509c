"""Several processes of one run: starting them, waiting for them, and looking at what the system says of them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.forks import DEADLINE, ROOT, STARTED
from tests.support.runs import run

TORCHRUN = "torch.distributed.run"  # the module


def start(command_line: list[str], **environment: str) -> subprocess.Popen:
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command_line, cwd=ROOT, env=variables, start_new_session=True, **pipes)
    STARTED.append(process)
    return process


def kill_started() -> None:
    """Kill what tests that failed have left running."""
    for process in STARTED:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    STARTED.clear()


def launch(module: str, world_size: int, settings: Path, out: Path, *arguments: str) -> dict:
    """What the module saved into `out`."""
    ended = run(module, str(settings), str(out), *arguments, processes=world_size)
    assert ended.codes == [0] * world_size, ended.stderr
    import torch  # late: most tests that start processes need none here

    return torch.load(out, weights_only=True)


def stat(pid: int) -> list[str]:
    """State, parent and so on of a process, or nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"], ["X"])
