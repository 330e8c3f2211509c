"""Starts programs as forks of a server that has imported torch already: a start costs milliseconds, not three seconds."""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent.parent
DEADLINE = 600.0  # seconds for what takes moments: only what hangs takes as long
STARTED: list[BaseProcess] = []  # of the tests of a module


def start_fork(
    program: str,
    arguments: Sequence[str],
    outputs: Sequence[str],
    environment: dict[str, str],
    cwd: Path = ROOT,
    faults: dict[str, list] | None = None,
) -> BaseProcess:
    """A program, a file or a module, in a process of its own, which leads a session of its own.

    `outputs`: the files for stdout and stderr; `faults`: functions of tests.support.planted, called first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = context.Process(target=become, args=(program, arguments, outputs, environment, cwd, faults or {}))
    with contextlib.chdir(ROOT):  # where the server finds what it preloads
        process.start()
    STARTED.append(process)
    return process


MARK = "HALFSTEP_RUN"  # environment variable of all processes of a run that a test started: its output folder


def find_processes(output: Path) -> dict[int, list[str]]:
    """{pid: its environment} of the live processes of the runs that write to this folder or below it."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: variables for pid in numbers if (variables := variables_of(pid, output))}


def variables_of(pid: int, output: Path) -> list[str]:
    """The environment of a live process of such a run; an empty list for any other process."""
    with contextlib.suppress(OSError):  # another user's, or it ended just now
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if any(f"{text}/".startswith(f"{MARK}={output}/") for text in variables):
            return variables
    return []


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_started() -> None:
    """Kill what tests that failed have left running."""
    for process in STARTED:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    STARTED.clear()


def end_server() -> None:
    """Wait for its end, so that what its forks used counts as processor time of the tests."""
    forkserver._forkserver._stop()  # there is no public name, and it does nothing where no server runs


def become(
    program: str,
    arguments: Sequence[str],
    outputs: Sequence[str],
    environment: dict[str, str],
    cwd: Path,
    faults: dict[str, list],
) -> NoReturn:
    """Be this program, to its end."""
    os.setsid()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    run_to_the_end(program, arguments, environment, faults)


def run_to_the_end(
    program: str, arguments: Sequence[str], environment: dict[str, str], faults: dict[str, list]
) -> NoReturn:
    """Be this program; this process has no other code to go back to."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts with & ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and so does nohup
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        run_program(program, arguments, faults)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking down the interpreter with all that the server imported takes half a second


def run_program(program: str, arguments: Sequence[str], faults: dict[str, list]) -> None:
    """Run it as `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS`."""
    for name, values in faults.items():
        getattr(importlib.import_module("tests.support.planted"), name)(*values)
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
