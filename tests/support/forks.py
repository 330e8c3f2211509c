"""Starts programs as forks of a server that has imported torch: a start takes milliseconds, not three seconds."""

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from tests.support import contracts

ROOT = Path(__file__).parent.parent.parent
DEADLINE = 600.0  # seconds; normal waits take moments, so only a process that hangs reaches it
STARTED: list[BaseProcess] = []  # processes that the tests of a module started


def put_halfstep_on_path(folder: Path) -> None:
    """Write the program `halfstep` of this checkout into a folder, for this process and the processes it starts."""
    program = folder / "halfstep"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(ROOT / "halfstep/__main__.py")])} "$@"\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def start_fork(
    program: str,
    arguments: Sequence[str],
    outputs: Sequence[str],
    environment: dict[str, str],
    cwd: Path = ROOT,
    faults: dict[str, list] | None = None,
) -> BaseProcess:
    """Start a program (a file or a module) in its own process and session.

    `outputs`: the files for stdout and stderr; `faults`: {function of tests.support.planted: arguments} to call first.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = fork_of_server(become, program, arguments, outputs, environment, cwd, faults or {})
    STARTED.append(process)
    return process


def fork_of_server(function: Callable, *arguments: object) -> BaseProcess:
    """Call the function in a fork of the server, and return the process."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    return process


MARK = "HALFSTEP_RUN"  # environment variable with the run's output folder, set in all processes of a test's run


def find_processes(output: Path) -> dict[int, list[str]]:
    """Return {pid: environment} of the live processes of runs that write to this folder or below it."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: variables for pid in numbers if (variables := variables_of(pid, output))}


def variables_of(pid: int, output: Path) -> list[str]:
    """Return the environment of a live process of a run that writes to `output`; [] for any other process."""
    with contextlib.suppress(OSError):  # another user's process, or it has just ended
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if any(f"{text}/".startswith(f"{MARK}={output}/") for text in variables):
            return variables
    return []


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_started() -> None:
    """Kill processes that failed tests left running."""
    for process in STARTED:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    STARTED.clear()


# --- the server. Private names of Python's fork server, because it has no public ones for this ---

ADDRESS = "HALFSTEP_FORKS"  # environment variable with the server's socket, which the workers of pytest-xdist inherit


def start_server() -> None:
    """Start the server, or connect to the one that the parent process has started."""
    server = forkserver._forkserver
    if server._forkserver_address is not None:
        return
    if ADDRESS in os.environ:
        server._forkserver_address = os.environ[ADDRESS]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # each fork gets a copy; the server ignores it
        server.ensure_running = lambda: None  # the parent watches over the server
        return
    server.set_forkserver_preload(["tests.support.preloaded"])
    with contextlib.chdir(ROOT):  # the folder in which the server finds the modules to preload
        server.ensure_running()
    os.environ[ADDRESS] = server._forkserver_address


def end_server() -> None:
    """End the server if this process started it, and wait for it, so that its CPU time counts as that of the tests."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        server._stop()
        os.environ.pop(ADDRESS, None)


def become(
    program: str,
    arguments: Sequence[str],
    outputs: Sequence[str],
    environment: dict[str, str],
    cwd: Path,
    faults: dict[str, list],
) -> NoReturn:
    """Run the program in this process, in its own session, and exit with its code."""
    os.setsid()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes programs ignore it
    run_to_the_end(program, arguments, environment, faults)


def run_to_the_end(
    program: str, arguments: Sequence[str], environment: dict[str, str], faults: dict[str, list]
) -> NoReturn:
    """Run the program in this process and exit with its code. Never return to the caller."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background programs ignore it
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
    if contracts.BROKEN:  # the program may have caught the error
        print(*contracts.BROKEN, sep="\n", file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would take half a second to clean up everything that the server imported


def run_program(program: str, arguments: Sequence[str], faults: dict[str, list]) -> None:
    """Run the program as `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS`."""
    if "LINES_FOLDER" in os.environ:
        importlib.import_module("tests.mistakes.recorder").record_program()
    if faults:
        importlib.import_module("tests.support.in_process").plant(faults)
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


# --- the programs of a program ---


class ForkingPopen(subprocess.Popen):
    """A Popen that runs `python FILE.py ...` and `python -m MODULE ...` in a fork, without importing torch again."""

    def __init__(self, args: Sequence[str], *rest, env: Mapping[str, str] | None = None, **options):
        program, *words = args
        if program == sys.executable and words[0] == "-u":  # torchrun starts its workers with it
            del words[0]
        if program == sys.executable and (words[0] == "-m" or words[0].endswith(".py")):
            words = words[words[0] == "-m" :]
            environment = dict(os.environ if env is None else env)
            before = options.get("preexec_fn", lambda: None)
            options["preexec_fn"] = lambda: (before(), become_child(words[0], words[1:], environment))
            sys.stdout.flush()  # otherwise the fork would write buffered text again
            sys.stderr.flush()
        super().__init__(args, *rest, env=env, **options)


def become_child(program: str, arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Run the program in the fork, as a new interpreter would. Popen has already set its pipes, group and folder."""
    nothing = os.open(os.devnull, os.O_RDWR)
    # Redirect the parent's files. If they were closed, the parent's objects could later close new files of that number.
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != nothing:
            os.dup2(nothing, number, inheritable=False)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does at its start
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    show_environment(environment)
    run_to_the_end(program, arguments, environment, {})


def show_environment(environment: dict[str, str]) -> None:
    """Write the environment over the one that /proc/self/environ shows, so that find_processes finds the fork."""
    start, end = map(int, Path("/proc/self/stat").read_text().split()[49:51])
    os.environ.clear()  # the inherited variables
    names = sorted(environment, key=lambda name: name not in (MARK, "RANK"))  # first those that tests read
    text = "\0".join(f"{name}={environment[name]}" for name in names).encode()
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)
