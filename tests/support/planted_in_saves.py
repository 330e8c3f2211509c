"""Faults at a chosen file operation, of a save or of the whole run; tests plant them through planted.py."""

import contextlib
import errno
import functools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable

import utils.files

EVERY = 200  # of so many writes of one file, one is an operation


class Operations:
    """Calls `before(save, number, what)` before each thing that the thread which saves does to files, save by save.

    It leaves out lines of logs and tables: other threads write some at the same time, so their number is not fixed.
    """

    every, counts_lines = EVERY, False

    def __init__(self, before: Callable[[int, int, str], None]):
        self._before, self._save, self._number, self._num_writes = before, 0, 0, 0
        for name in ("fsync", "replace", "link", "unlink"):
            setattr(os, name, functools.partial(self._operate, name, getattr(os, name)))
        utils.files.open = self._open

    def _operate(self, name: str, do: Callable, *paths, **options):
        temporary_is_cleared = name == "unlink" and os.path.basename(paths[0]).startswith(".")  # mostly there is none
        if not temporary_is_cleared:
            self._note(f"{name} {' '.join(map(name_of, paths))}")
        return do(*paths, **options)

    def _note(self, what: str) -> None:
        if threading.current_thread().name.startswith("checkpoint"):
            if what == "open .last.pth.tmp":
                self._save, self._number, self._num_writes = self._save + 1, 0, 0
            self._before(self._save, self._number, what)
            self._number += 1

    def _open(self, path, mode="r", **options):
        if mode == "r" or (mode == "ab" and not self.counts_lines):
            return open(path, mode, **options)
        self._note(f"open {path.name}")
        file = open(path, mode, **options)  # noqa: SIM115
        write = file.write

        def counted(data):
            self._num_writes += 1
            if self._num_writes % self.every == 0:
                file.flush()  # what came before is on the disk
                self._note(f"write {path.name}")
            return write(data)

        return Writes(file, counted)


def name_of(path: str | os.PathLike | int) -> str:
    """The name of a file, also of an open one; `folder` for the run's, which no two runs have in common."""
    path = f"/proc/self/fd/{path}" if isinstance(path, int) else path
    return "folder" if os.path.isdir(path) else os.path.basename(os.path.realpath(path))


class AllOperations(Operations):
    """Calls `before(nth, what)` before all that a run does to files but removing them, logs and tables included."""

    every, counts_lines = 1, True

    def __init__(self, before: Callable[[int, str], None]):
        super().__init__(before)
        self._counts = Counter()

    def _note(self, what: str) -> None:
        if not what.startswith("unlink"):
            self._counts[what] += 1
            self._before(self._counts[what], what)


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


def kill_before(what: str, nth: int) -> None:
    """kill -9 before the nth time that a run does this to files."""

    def before(*place) -> None:
        if place == (nth, what):
            os.kill(os.getpid(), signal.SIGKILL)

    AllOperations(before)


def fill_disk(save: int, path: str) -> None:
    """Another program takes all room that is left, as this save begins."""

    def before(*place) -> None:
        if place[:2] == (save, 0):
            with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    Operations(before)


def list_all_operations(path: str) -> None:
    """Write [nth, what] of all that a run does to files into a file, one a line."""
    listing = open(path, "w", buffering=1)  # noqa: SIM115
    AllOperations(lambda *place: print(json.dumps(place), file=listing))


def find_no_room(what: str | list[str], nth: int, lasts: bool) -> None:
    """The disk is full when a run does this, or one of these, the nth time, and has room again at once unless it `lasts`."""
    places = [(nth, each) for each in ([what] if isinstance(what, str) else what)]
    is_full = [False]

    def before(*place) -> None:
        is_full[0] = place in places or (lasts and is_full[0])
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    AllOperations(before)


def list_operations(path: str) -> None:
    """Write [save, number, what] of all operations into a file, one a line."""
    listing = open(path, "a", buffering=1)  # noqa: SIM115  # of each process
    Operations(lambda *place: print(json.dumps(place), file=listing))
