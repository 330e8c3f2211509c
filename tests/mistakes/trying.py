"""Runs chosen tests on a copy of the project that has a mistake, in a fork that has already imported torch."""

import ctypes
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from scripts.benchmarks.gpu_session import kill_children
from utils.program import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
COPY = Path()  # this worker's copy of the project
LIBRARIES = (
    "torch torchvision timm timm.data numpy scipy PIL.Image hypothesis pytest yaml tqdm matplotlib.pyplot sklearn"
)
# A test at the time limit hangs because of the mistake if it took this many times as long as usual.
HANGS = 5
NO_TESTS = 5  # pytest's exit code if none of the recorded tests exists any more
NEGLIGIBLE = 60.0  # seconds; a test that takes less time may be slow by chance


class Job(NamedTuple):
    """A mistake to try: the file gets another text. `usual`: seconds of the tests without the mistake."""

    id: str
    file: str
    text: str
    tests: list[str]
    usual: dict[str, float]


class Tried(NamedTuple):
    """How the tests of a mistake ended."""

    outcome: str  # noticed, lives, late (not noticed in time), or untested
    test: str  # the test that failed, or that ran at the time limit
    seconds: float


def copy_project(target: Path) -> None:
    """Copy the files that git knows or would add, in their current state."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    # Some tests ask git for the files of the project.
    subprocess.run(
        "git init -q . && git add -A && git -c user.name=x -c user.email=x commit -qm x", shell=True, cwd=target
    )
    # Byte code that is compared with the text of its file, not with the time.
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
    subprocess.run(compiling, cwd=target, stdout=subprocess.DEVNULL)


def import_libraries() -> None:
    """Import what tests import, so that a fork need not. Nothing of the project, which differs in each copy."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES.split():
        with suppress(ImportError):
            importlib.import_module(name)


def try_all(jobs: list[Job], limit: float, num_workers: int, stop: float | None = None) -> Iterator[tuple[str, Tried]]:
    """Try the jobs in several processes, each with a copy of the project. Begin none after the time `stop`."""
    if not jobs:
        return
    import_libraries()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(num_workers, context, start_worker, [Path(folder)]) as workers:
            waiting = [workers.submit(try_job, job, limit, stop) for job in jobs]
            for each in as_completed(waiting):
                if each.result():
                    yield each.result()


def start_worker(folder: Path) -> None:
    global COPY
    COPY = folder / str(os.getpid())
    COPY.mkdir()
    copy_project(COPY)
    die_with_parent()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes that a test leaves become children of this one


def try_job(job: Job, limit: float, stop: float | None) -> tuple[str, Tried] | None:
    """Plant the mistake in the copy, run the tests until one fails, and restore the file."""
    if stop is not None and time.monotonic() > stop:
        return None
    if not job.tests:
        return job.id, Tried("untested", "", 0.0)
    path, begin, log = COPY / job.file, time.monotonic(), COPY.parent / f"{COPY.name}.log"
    text = path.read_text(encoding="utf-8")
    path.write_text(job.text, encoding="utf-8")
    log.write_text("")
    try:
        if (pid := os.fork()) == 0:
            become_pytest(COPY, job.tests, log)
        code = wait(pid, limit)
    finally:
        path.write_text(text, encoding="utf-8")
        kill_children()
        shutil.rmtree(f"{COPY}.tmp", ignore_errors=True)
    end, (test, since) = time.monotonic(), last_test(log)
    seconds = end - begin
    if code is None:
        hangs = test and end - since > max(NEGLIGIBLE, HANGS * job.usual.get(test, 0))
        return job.id, Tried("noticed" if hangs else "late", test, seconds)
    outcome = {0: "lives", NO_TESTS: "untested"}.get(code, "noticed")
    return job.id, Tried(outcome, test if outcome == "noticed" else "", seconds)


def wait(pid: int, limit: float) -> int | None:
    """Return the exit code of a child; kill it and return None at the time limit."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def last_test(log: Path) -> tuple[str, float]:
    """Return the last test that began, and when."""
    begun = re.findall(r"^begin (\S+) (.*)$", log.read_text(errors="replace"), re.M)
    return (begun[-1][1], float(begun[-1][0])) if begun else ("", 0.0)


class Chosen:
    """A plug-in for pytest that runs the chosen tests in their order, and logs when each begins."""

    def __init__(self, tests: list[str], log: TextIO):
        self.order, self.log = {test: index for index, test in enumerate(tests)}, log

    def pytest_collection_modifyitems(self, items: list) -> None:
        order = {item: self.order.get(item.nodeid, self.order.get(item.nodeid.split("::")[0])) for item in items}
        items[:] = sorted((item for item in items if order[item] is not None), key=order.get)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(f"\nbegin {time.monotonic()} {nodeid}", file=self.log, flush=True)


def become_pytest(copy: Path, tests: list[str], log: Path) -> NoReturn:
    """Run the tests in this process, and exit with 0 if all passed."""
    code = 1
    with open(log, "a") as file, suppress(BaseException):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        die_with_parent()
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        os.chdir(copy)
        own = {path.stem for path in copy.iterdir() if path.is_dir() or path.suffix == ".py"}
        for name in [name for name in sys.modules if name.split(".")[0] in own]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(each for each in sys.path if Path(each or ".").resolve() != ROOT)]
        import pytest

        # The programs that tests start import the main module of this process: here that of pytest, not plant.py, which
        # would import the project without the mistake.
        sys.modules["__main__"] = importlib.import_module("pytest.__main__")
        files = [file for file in dict.fromkeys(test.split("::")[0] for test in tests) if Path(file).exists()]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={copy}.tmp"]
        code = int(pytest.main([*options, *files], plugins=[Chosen(tests, file)]))
    os._exit(code)
