"""Opening and dates of files, and their replacement: a file is the old or the new version, even if the machine stops."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from utils.errors import ConfigError, not_a_file
from utils.held_folders import check_in_place, is_in_place

MOST_NAMES = 2**28  # bytes of a file with a name a line
BYTES_THAT_TELL = 4096  # of a file, in which a kind is recognized
SECONDS_BETWEEN_ATTEMPTS = 0.2  # to lock a file that another process has


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[IO[bytes]]:
    """Write to the given file; it takes the place of `path` once all of it is on the disk, or not at all.

    `shared`: several processes may do so at once, so each writes under a name of its own. Otherwise the name is fixed:
    the next attempt replaces what a killed process left.
    """
    check_in_place(path)
    if not shared:  # not an index, which nobody named and which takes the place of whatever has its name
        refuse_special(path)
    temporary = path.with_name(f".{path.name}{'.' + secrets.token_hex(4) if shared else ''}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # it may be a link to someone's file
        with open(temporary, "xb") as file:
            yield file
            sync(file)
        check_in_place(path)  # writing a large file takes time
        os.replace(temporary, path)
    finally:
        if is_in_place(path):
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None] | None = None) -> Iterator[IO[bytes] | None]:
    """The file, made if it is not there, open for reading and writing, and locked against other threads and processes.

    While another has it, `wait` is called again and again; without `wait` there is None instead of a file. The system
    frees the lock even after kill -9.
    """
    while True:
        with open(path, "r+b", opener=creating) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if wait is None:
                    yield None
                    return
                wait()
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
                continue
            except OSError:  # a file system without locks: two may do the same work, but files are replaced whole
                pass
            try:
                if _is_at(file, path):  # else its last owner renamed or removed it
                    yield file
                    return
            finally:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile would keep it


def creating(path: str, flags: int) -> int:
    """An `opener` for `open` of a file that is made if it is not there; never of what a link leads to, or of a pipe."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def refuse_special(path: Path) -> None:
    """OSError where a rename onto the path would take a device or a pipe away from the whole machine."""
    kind = not_a_file(path) if path.exists() else None
    if path.absolute().parent == Path("/dev"):  # in which stdout is a link to what may be a file
        kind = "a device"
    if kind:
        raise OSError(errno.EINVAL, f"it is {kind}; name a file")


class Kind(NamedTuple):
    """A kind of file that a script writes. The script overwrites files of this kind only."""

    name: str  # "a report of a run"
    starts: tuple[bytes, ...]  # such a file starts with one of these
    has: bytes = b""  # and has this in its first bytes


def is_of_kind(path: Path, kind: Kind) -> bool:
    """Return whether the file begins as those of this kind do."""
    with open(path, "rb", opener=without_waiting) as file:
        first = file.read(BYTES_THAT_TELL)
    return first.startswith(kind.starts) and kind.has in first


def refuse_other_kind(flag: str, path: Path, kind: Kind, remedy: str = "name another file") -> None:
    """Raise ConfigError if the path is a file of another kind, which would be lost. An empty file is of any kind."""
    if path.is_file() and path.stat().st_size and not is_of_kind(path, kind):
        raise ConfigError(f"{flag}: {path} exists and is not {kind.name}; {remedy}")


def without_waiting(path: str, flags: int) -> int:
    """An `opener` for `open` that does not wait for the writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def has_other_names(file: int | Path) -> bool:
    """Return whether a file, which may be an open descriptor, has further hard links, as in a snapshot by `cp -al`."""
    status = os.stat(file)
    return stat.S_ISREG(status.st_mode) and status.st_nlink > 1


class LineFile:
    """A text file that a run appends lines to. A hard link that someone makes of it keeps the content of that moment.

    Each write checks whether the file has further names. If so, a copy takes the place of its own name and gets the lines.
    Lines that cannot be written, as on a full disk, are kept for the next write.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = self._open(path)
        self._unwritten = b""

    @staticmethod
    def _open(path: Path) -> IO[bytes]:
        return open(path, "ab", buffering=0, opener=without_waiting)

    def write(self, lines: str) -> None:
        """Append whole lines at once. OSError if that is not possible."""
        self._unwritten += lines.encode()
        # In a folder that was moved or taken by another run, a copy would replace a file of that run.
        if has_other_names(self._file.fileno()) and is_in_place(self.path) and _is_at(self._file, self.path):
            self._separate()
        while self._unwritten:
            count = self._file.write(self._unwritten)
            if count is None:  # a pipe that is full
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.path))
            self._unwritten = self._unwritten[count:]

    def _separate(self) -> None:
        """Go on in a copy that replaces this name of the file."""
        copied = None
        try:
            with open(self.path, "rb") as source, replacing(self.path) as copy:
                os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
                shutil.copyfileobj(source, copy)
                copied = self._open(Path(copy.name))  # before it has the name: no error may come in between
        finally:
            if copied is not None:
                if _is_at(copied, self.path):
                    self._file, copied = copied, self._file
                copied.close()

    def close(self) -> None:
        """Close the file. OSError if lines could not be written."""
        try:
            if self._unwritten:
                self.write("")
        finally:
            self._unwritten = b""
            self._file.close()


def content_of(path: Path, most: int = 2**30, takes: tuple[str | None, ...] = (None,)) -> bytes:
    """The bytes of a file. OSError for a larger one, and for what is none, unless `takes` has its kind: it may have no end."""
    if (kind := not_a_file(path)) not in takes:
        raise OSError(errno.EINVAL, f"it is {kind}; name a file", str(path))
    with open(path, "rb", opener=without_waiting) as file:
        # A pipe has a writer, as in -list <(find photos), or is at its end.
        os.set_blocking(file.fileno(), kind == "a pipe")
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1 if kind else -1) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EINVAL, "it is too large; name another file", str(path))
    return content


def read_names(path: Path, errors: str = "strict") -> str:
    """The text of a file with a name a line, or of a pipe. OSError for what no list of names is as long as, and for no text."""
    return names_in(content_of(path, MOST_NAMES, (None, "a pipe")), errors, str(path))


def names_in(content: bytes, errors: str, path: str) -> str:
    """The text in these bytes, which are of a file of names. ConfigError where they are none."""
    if b"\0" in content:
        raise ConfigError(f"{path}: no text (a zero byte), or UTF-16; save it as UTF-8")
    return content.decode("utf-8-sig", errors)


def sync(file: IO[bytes]) -> None:
    """Flush the file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk: a rename in it is only then durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Bytes that can be written to a folder, which may not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(folder: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def check_writable(folder: Path) -> None:
    """Raise OSError if no file can be created in the folder, or in its nearest existing parent."""
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(folder)):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
