"""Runs of the real programs, as a person types them, and what they print and leave behind."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def run(
    script: str, *arguments: str, cwd: Path | None = None, environment: dict | None = None, timeout: float = 180
) -> subprocess.CompletedProcess:
    """An entry script as a person runs it."""
    return subprocess.run(
        command(script, *arguments),
        cwd=cwd or ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_folder(output: Path) -> Path:
    """The one folder that a run made."""
    (folder,) = output.iterdir()
    return folder


def run_timed(script: str, *arguments: str) -> tuple[subprocess.CompletedProcess, float]:
    """`run`, and the processor's seconds that it took: those of the clock depend on what else runs here."""

    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that ended
        return used.ru_utime + used.ru_stime

    before = seconds()
    return run(script, *arguments), seconds() - before


def rows(text: str) -> dict[str, tuple[str, str]]:
    """{row: (verdict, its text)} of what -check prints."""
    found = re.findall(r"^(\S.*?) +(ok|WARN|WRONG) +(.*(?:\n {26}.*)*)", text, re.M)
    assert found and len({what for what, _, _ in found}) == len(found), text
    return {what: (verdict, told) for what, verdict, told in found}
