"""A process that dies at a chosen file operation, simulated within the process of the test."""

import builtins
import contextlib
import functools
import io
import os
from collections.abc import Iterator
from unittest.mock import patch

CHANGES = ("replace", "rename", "link", "symlink", "unlink", "rmdir", "mkdir", "fsync")


class Death(BaseException):
    """Raised in place of a file operation at or after the death."""


class Disk:
    """Counts the file operations, and lets none of them reach the disk from operation number `death` on.

    If that operation is a write, its first `part` bytes reach the disk. Neither the memory of open files nor what
    `finally` blocks do reaches it after the death, as after kill -9.
    """

    def __init__(self, death: int | None, part: int):
        self._death, self._part = death, part
        self.operations: list[str] = []
        self.is_dead = False
        self._unsynced: set[int] = set()  # inodes of files with content that may be lost if the machine stops
        self.renamed_unsynced: list[str] = []

    def note(self, what: str) -> None:
        self.is_dead = self.is_dead or len(self.operations) == self._death
        self.operations.append(what)
        if self.is_dead:
            raise Death(what)

    def change(self, name: str, do, *paths, **options):
        self.note(f"{name} {' '.join(str(path) for path in paths)}")
        if name == "fsync":  # skipped, because it is slow on a busy disk
            self._unsynced.discard(os.fstat(paths[0]).st_ino)
            return None
        if name == "replace" and os.stat(paths[0], dir_fd=options.get("src_dir_fd")).st_ino in self._unsynced:
            self.renamed_unsynced.append(str(paths[0]))
        return do(*paths, **options)

    def write(self, file: io.FileIO, data) -> int:
        """Write to a file. A death raises no error here, because torch aborts the process if a write fails."""
        size = memoryview(data).nbytes
        if os.fstat(file.fileno()).st_nlink == 0:  # a temporary file without a name
            return io.FileIO.write(file, data)
        if not self.is_dead:
            try:
                self.note(f"write {size} bytes to {file.name}")
            except Death:
                data = memoryview(data).cast("B")[: self._part]
            self._unsynced.add(os.fstat(file.fileno()).st_ino)
            io.FileIO.write(file, data)
        return size

    def open(self, real, path, mode="r", buffering=-1, *others, **options):
        options |= zip(("encoding", "errors", "newline", "closefd", "opener"), others, strict=False)  # as pathlib does
        if not {*mode} & {*"wax+"}:
            return real(path, mode, buffering, **options)
        text = {name: options.pop(name, None) for name in ("encoding", "errors", "newline")}
        if options.get("opener") is None and not isinstance(path, int):
            self.note(f"open {path}")
        raw = Raw(path, "".join(each for each in mode if each not in "bt"), **options)
        raw.disk = self
        if buffering == 0:
            return raw
        file = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return file if "b" in mode else io.TextIOWrapper(file, **text)

    def os_open(self, real, path, flags, *arguments, **options):
        if flags & (os.O_CREAT | os.O_TRUNC):
            self.note(f"open {path}")
        return real(path, flags, *arguments, **options)


class Raw(io.FileIO):
    """An open file of a Disk."""

    disk: Disk

    def write(self, data) -> int:
        return self.disk.write(self, data)

    def truncate(self, size: int | None = None) -> int:
        self.disk.note(f"truncate {self.name}")
        return super().truncate(size)


@contextlib.contextmanager
def dying(death: int | None = None, part: int = 0) -> Iterator[Disk]:
    """Let the block die at its file operation of this number, counted from 0. Yield its Disk."""
    disk = Disk(death, part)
    with contextlib.ExitStack() as patches:
        for name in CHANGES:
            patches.enter_context(patch.object(os, name, functools.partial(disk.change, name, getattr(os, name))))
        patches.enter_context(patch.object(os, "open", functools.partial(disk.os_open, os.open)))
        for module in (builtins, io):  # pathlib has the second
            patches.enter_context(patch.object(module, "open", functools.partial(disk.open, module.open)))
        try:
            yield disk
        except BaseException:
            if not disk.is_dead:
                raise


def deaths(operations: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the number and part of each death to try, for the operations of a block that did not die.

    A write dies without a byte, in its middle, and before its last and last but one byte, such as a line's end.
    """
    for number, what in enumerate(operations):
        size = int(what.split()[1]) if what.startswith("write ") else 0
        yield from ((number, part) for part in sorted({0, size // 2, max(size - 2, 0), max(size - 1, 0)}))
