"""Runs of the real programs, as a person types them, and what they print and leave behind."""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.forks import DEADLINE, ROOT, start_fork
from tests.support.ports import as_ranks


@dataclass
class Ended:
    """What became of a run."""

    codes: list[int]  # of its processes
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        return self.codes[0]

    @property
    def printed(self) -> str:
        return self.stdout + self.stderr


class Run:
    """A program in one process, or the ranks of one run, each a fork."""

    def __init__(self, script: str, *arguments: str, processes: int = 1, environment: dict | None = None, **options):
        """`script`: a file, or a module by its dotted name. For the options see start_fork."""
        self._stdout, self._stderr = (tempfile.NamedTemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        program = str(ROOT / script) if script.endswith(".py") else script
        outputs = [self._stdout.name, self._stderr.name]
        self.processes = [
            start_fork(program, arguments, outputs, (environment or {}) | rank, **options)
            for rank in as_ranks(processes)
        ]

    def wait(self) -> Ended:
        for process in self.processes:
            process.join(DEADLINE)
        codes = [process.exitcode for process in self.processes]
        with self._stdout as stdout, self._stderr as stderr:
            ended = Ended(codes, stdout.read(), stderr.read())
        assert None not in codes, ended
        return ended


def run(script: str, *arguments: str, **options) -> Ended:
    """A program to its end. For the options see Run."""
    return Run(script, *arguments, **options).wait()


def command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def run_fresh(script: str, *arguments: str, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> Ended:
    """A program in a new interpreter: where imports, sys.path or the launcher's own processes are what is tested."""
    done = subprocess.run(
        command(script, *arguments),
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return Ended([done.returncode], done.stdout, done.stderr)


def run_folder(output: Path) -> Path:
    """The one folder that a run made."""
    (folder,) = output.iterdir()
    return folder


def rows(text: str) -> dict[str, tuple[str, str]]:
    """{row: (verdict, its text)} of what -check prints."""
    found = re.findall(r"^(\S.*?) +(ok|WARN|WRONG) +(.*(?:\n {26}.*)*)", text, re.M)
    assert found and len({what for what, _, _ in found}) == len(found), text
    return {what: (verdict, told) for what, verdict, told in found}
