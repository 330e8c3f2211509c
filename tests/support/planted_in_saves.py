"""Faults at a chosen file operation of a save or of the whole run; tests plant them through planted.py."""

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
from tests.support.in_process import change

EVERY = 200  # only every 200th write to a file counts as an operation


class Operations:
    """Calls `before(save, number, what)` before each file operation of the saving thread, counted per save.

    Lines of logs and tables are excluded: other threads write them at the same time, so their number varies.
    """

    every, counts_lines = EVERY, False

    def __init__(self, before: Callable[[int, int, str], None]):
        self._before, self._save, self._number, self._num_writes = before, 0, 0, 0
        for name in ("fsync", "replace", "link", "unlink"):
            change(os, name, functools.partial(self._operate, name, getattr(os, name)))
        change(utils.files, "open", self._open)

    def _operate(self, name: str, do: Callable, *paths, **options):
        # Whether a temporary file is left to delete varies, so its deletion is not counted.
        temporary_is_cleared = name == "unlink" and os.path.basename(paths[0]).startswith(".")
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
                file.flush()  # write everything so far to the disk
                self._note(f"write {path.name}")
            return write(data)

        return Writes(file, counted)


def name_of(path: str | os.PathLike | int) -> str:
    """Return the name of a file, given by path or descriptor; `folder` for a folder, because its name varies."""
    path = f"/proc/self/fd/{path}" if isinstance(path, int) else path
    return "folder" if os.path.isdir(path) else os.path.basename(os.path.realpath(path))


class AllOperations(Operations):
    """Calls `before(nth, what)` before each file operation of a run except deletions, including logs and tables."""

    every, counts_lines = 1, True

    def __init__(self, before: Callable[[int, str], None]):
        super().__init__(before)
        self._counts = Counter()

    def _note(self, what: str) -> None:
        if not what.startswith("unlink"):
            self._counts[what] += 1
            self._before(self._counts[what], what)


class Writes:
    """A file with a replaced `write` method."""

    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def kill_at(save: int, number: int) -> None:
    """Kill the run with SIGKILL before this operation of this save."""

    def before(*place) -> None:
        if place[:2] == (save, number):
            os.kill(os.getpid(), signal.SIGKILL)

    Operations(before)


def kill_before(what: str, nth: int) -> None:
    """Kill the run with SIGKILL before it does this file operation for the nth time."""

    def before(*place) -> None:
        if place == (nth, what):
            os.kill(os.getpid(), signal.SIGKILL)

    AllOperations(before)


def fill(path: str) -> None:
    """Fill the disk with this file, as another program might."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def fill_disk(save: int, path: str) -> None:
    """Fill the disk when this save starts."""

    def before(*place) -> None:
        if place[:2] == (save, 0):
            fill(path)

    Operations(before)


def list_all_operations(path: str) -> None:
    """Write [nth, operation] for each file operation of a run to a file, one per line."""
    listing = open(path, "w", buffering=1)  # noqa: SIM115
    AllOperations(lambda *place: print(json.dumps(place), file=listing))


def find_no_room(what: str | list[str], nth: int, lasts: bool) -> None:
    """Make the disk full at the nth occurrence of this operation, or of one of several. It stays full if it `lasts`."""
    places = [(nth, each) for each in ([what] if isinstance(what, str) else what)]
    is_full = [False]

    def before(*place) -> None:
        is_full[0] = place in places or (lasts and is_full[0])
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    AllOperations(before)


def list_operations(path: str) -> None:
    """Write [save, number, operation] for each operation to a file, one per line."""
    listing = open(path, "a", buffering=1)  # noqa: SIM115  (several processes append to it)
    Operations(lambda *place: print(json.dumps(place), file=listing))
