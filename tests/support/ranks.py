"""Processes that run programs of several ranks one after the other: faster than new processes for each program."""

import atexit
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.forks import DEADLINE, fork_of_server
from tests.support.in_process import serve


class Ranks:
    """Forks of the server of forks.py, which start when they are first needed and again after an error."""

    def __init__(self):
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(
        self, script: str, words: Sequence[str], ranks: list[dict[str, str]], cwd: Path, faults: dict[str, list]
    ) -> tuple[list[int], str, str]:
        """Run a program to its end, each rank with its variables. Return the exit codes, stdout and stderr."""
        if len(self._processes) != len(ranks):
            self.end()
            self._start(len(ranks))
        with tempfile.NamedTemporaryFile("w+") as stdout, tempfile.NamedTemporaryFile("w+") as stderr:
            codes: list[int | None] = []
            try:
                for connection, variables in zip(self._connections, ranks, strict=True):
                    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
                    connection.send((script, words, [stdout.name, stderr.name], environment, cwd, faults))
                codes = [self._code(number) for number in range(len(ranks))]
            finally:
                # After an error, the program may have left anything behind.
                if codes not in ([0] * len(ranks), [2] * len(ranks)) or self._have_ended():
                    self._kill()
            printed = stdout.read(), stderr.read()
        assert None not in codes, printed
        return codes, *printed

    def _start(self, number: int) -> None:
        for _ in range(number):
            connection, other_end = multiprocessing.Pipe()
            process = fork_of_server(serve, other_end)
            other_end.close()
            self._processes.append(process)
            self._connections.append(connection)

    def _code(self, number: int) -> int | None:
        """Return the exit code of the program in a process, or of the process if it died; None if it hangs."""
        process, connection = self._processes[number], self._connections[number]
        if not connection.poll(DEADLINE):
            return None
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            return process.exitcode

    def _have_ended(self) -> bool:
        return not all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        """End the processes, and wait for them."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(DEADLINE)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._connections.clear()


RANKS = Ranks()
atexit.register(RANKS.end)
