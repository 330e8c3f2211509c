"""Processes that start at once: forks of a server that has imported everything already (fork_server.py)."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent.parent
DEADLINE = 600.0  # seconds for what takes moments: only what hangs takes as long
STARTED: list = []  # processes of the tests of a module


class Fork:
    """A program in a process of its own, which leads a session of its own; used as subprocess.Popen is."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        output: IO,
        errors: IO,
        *,
        cwd: Path = ROOT,
        environment: dict[str, str] | None = None,
        faults: dict[str, list] | None = None,
    ):
        """`program`: a file or a module. `faults`: functions of tests.support.planted, called first."""
        request = {"program": program, "arguments": arguments, "cwd": str(cwd), "faults": faults or {}}
        request["environment"] = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        self._answers, client = socket.socketpair()
        with client:
            files = [output.fileno(), errors.fileno(), client.fileno()]
            sent = socket.send_fds(_server().requests, [message := json.dumps(request).encode() + b"\n"], files)
            _server().requests.sendall(message[sent:])
        self._received = b""
        self.returncode: int | None = None
        self.pid: int = self._receive(DEADLINE)
        STARTED.append(self)

    def _receive(self, timeout: float | None):
        """The next line of the server: the pid; then the exit code, when it has ended."""
        self._answers.settimeout(timeout)
        while b"\n" not in self._received:
            more = self._answers.recv(1 << 10)
            assert more, "the fork server has ended"
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = DEADLINE) -> int:
        if self.returncode is None:
            try:
                self.returncode = self._receive(timeout)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    def __init__(self):
        self.requests, requests = socket.socketpair()
        with requests:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(requests.fileno())],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                pass_fds=[requests.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def end(self) -> None:
        self.requests.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def end_server() -> None:
    """Kill what still runs."""
    if _server.cache_info().currsize:
        _server().end()
        _server.cache_clear()
