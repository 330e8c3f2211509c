"""Several processes of one run: starting them, waiting for them, and looking at what the system says of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support.runs import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STARTED: list[subprocess.Popen] = []


def start(command_line: list[str], **environment: str) -> subprocess.Popen:
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command_line, cwd=ROOT, env=variables, start_new_session=True, **pipes)
    STARTED.append(process)
    return process


def kill_started() -> None:
    """Kill what tests that failed have left running."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(module: str, world_size: int, settings: Path, out: Path, *arguments: str) -> dict:
    """What the module saved into `out`."""
    assert exit_codes(module, world_size, settings, out, *arguments) == [0] * world_size
    import torch  # late: most tests that start processes need none here

    return torch.load(out, weights_only=True)


def exit_codes(module: str, world_size: int, *arguments) -> list[int]:
    """Of the module, run once per process with the environment that launchers set; none for one process."""
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (common | {"RANK": str(rank)} if world_size > 1 else {}),
        )
        for rank in range(world_size)
    ]
    return [process.wait(timeout=120) for process in processes]


def children(pid: int) -> list[int]:
    """Processes that this one started, and theirs."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and stat(int(entry))[1:2] == [str(pid)]:
            found += [int(entry), *children(int(entry))]
    return found


def stat(pid: int) -> list[str]:
    """State, parent and so on of a process, or nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"], ["X"])
