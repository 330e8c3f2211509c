"""Runs of the real program, each in a fork of this one, which has torch in memory already: with a fault where one is asked.

python -m tests.faults.forked FLAGS, flags of a run that goes first and imports all that runs import late. Then told one
run a line on standard input, as JSON, and answering one line each:
{"flags": [...], "faults": {name: arguments}} -> {"code": exit code or minus the signal, "told": what it printed}
"""

import contextlib
import functools
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable

import main_single_gpu
import utils.files
from utils.errors import exit_code
from utils.plot import Plotter

EVERY = 200  # of so many writes of one file, one is an operation
Plotter.draw = lambda *arguments, **options: None  # pictures take longer than these runs


class Operations:
    """Calls `before(save, number, what)` before each thing that the thread which saves does to files, save by save."""

    def __init__(self, before: Callable[[int, int, str], None]):
        self._before, self._save, self._number, self._num_writes = before, 0, 0, 0
        for name in ("fsync", "replace", "link", "unlink"):
            setattr(os, name, functools.partial(self._operate, name, getattr(os, name)))
        utils.files.open = self._open

    def _operate(self, name: str, do: Callable, *paths, **options):
        temporary_is_cleared = name == "unlink" and os.path.basename(paths[0]).startswith(".")  # mostly there is none
        if not temporary_is_cleared:
            self._note(f"{name} {' '.join(os.path.basename(str(each)) for each in paths)}")
        return do(*paths, **options)

    def _note(self, what: str) -> None:
        if threading.current_thread().name.startswith("checkpoint"):
            if what == "open .last.pth.tmp":
                self._save, self._number, self._num_writes = self._save + 1, 0, 0
            self._before(self._save, self._number, what)
            self._number += 1

    def _open(self, path, mode):
        self._note(f"open {path.name}")
        file = open(path, mode)  # noqa: SIM115
        write = file.write

        def counted(data):
            self._num_writes += 1
            if self._num_writes % EVERY == 0:
                file.flush()  # what came before is on the disk
                self._note(f"write {path.name}")
            return write(data)

        return Writes(file, counted)


class Writes:
    """A file whose `write` is another."""

    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def kill_at(save: int, number: int) -> None:
    """kill -9 before this operation of this save."""

    def before(*place) -> None:
        if place[:2] == (save, number):
            os.kill(os.getpid(), signal.SIGKILL)

    Operations(before)


def fill_disk(save: int, path: str) -> None:
    """Another program takes all room that is left, as this save begins."""

    def before(*place) -> None:
        if place[:2] == (save, 0):
            with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    Operations(before)


def list_operations(path: str) -> None:
    """Write [save, number, what] of all operations into a file, one a line."""
    listing = open(path, "w", buffering=1)  # noqa: SIM115
    Operations(lambda *place: print(json.dumps(place), file=listing))


def jump(days: float) -> None:
    """The clock that people set goes so many days on, or back, at every second look."""
    real, looks = time.time, [0]

    def jumping() -> float:
        looks[0] += 1
        return real() + looks[0] % 2 * days * 86400

    time.time = jumping
    strftime, localtime = time.strftime, time.localtime
    time.strftime = lambda form, moment=None: strftime(form, moment or localtime(time.time()))


def limit_files(size: int) -> None:
    """As if the disk were full behind so many bytes of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


FAULTS = {each.__name__: each for each in (kill_at, fill_disk, list_operations, jump, limit_files)}


def in_a_fork(flags: list[str], faults: dict) -> dict:
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.dup2(told.fileno(), 1)
                os.dup2(told.fileno(), 2)
                for name, arguments in faults.items():
                    FAULTS[name](*arguments)
                code = exit_code(main_single_gpu.main, flags)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "told": told.read()}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        assert main_single_gpu.main(sys.argv[1:]) == 0
    for line in sys.stdin:
        print(json.dumps(in_a_fork(**json.loads(line))), flush=True)
