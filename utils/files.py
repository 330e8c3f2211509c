"""Safe access to files. A replaced file is always complete, in its old or new version, even if the machine stops."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from utils.commands import HALFSTEP
from utils.errors import ConfigError, UserError, not_a_file

MOST_NAMES = 2**28  # maximum bytes of a file with one name per line
SHIPPED_FOLDERS = (("configs",), ("weights",))  # folders whose files users can name from any working directory
BYTES_THAT_TELL = 4096  # number of bytes at the start of a file that show its kind
SECONDS_BETWEEN_ATTEMPTS = 0.2  # pause before the next attempt to lock a file that another process has locked


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool = False, check: Callable[[], None] = lambda: None) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `path` when it is completely on disk. After an error, `path` is unchanged.

    `check` is called at the start, and again when the file is on the disk, because a busy disk takes time.
    With `shared`, several processes may replace `path` at once, so each temporary file has its own name. Otherwise the
    name is fixed, so that the next attempt replaces the temporary file of a killed process.
    """
    check()
    if not shared:  # shared files are indexes; no user chose their path, so they may replace anything there
        refuse_special(path)
    temporary = path.with_name(f".{path.name}{'.' + secrets.token_hex(4) if shared else ''}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a leftover file may be a link to another file
        with open(temporary, "xb") as file:
            yield file
            sync(file)
        check()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None] | None = None) -> Iterator[IO[bytes] | None]:
    """Yield a file open for reading and writing, created if missing, and locked against other threads and processes.

    While another process or thread has the lock, `wait` is called repeatedly. Without `wait`, yield None instead of
    waiting. The system releases the lock even after kill -9.
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
            except OSError:
                # The file system has no locks. Two processes may do the same work, but each replaces whole files.
                pass
            try:
                if _is_at(file, path):  # otherwise the last owner of the lock renamed or removed the file
                    yield file
                    return
            finally:
                # Unlock before closing, because a process that was forked in the meantime would keep the lock.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def creating(path: str, flags: int) -> int:
    """Open a file as an `opener` for `open`. Create it if missing, follow no link, and never wait for a pipe."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def refuse_special(path: Path) -> None:
    """Raise OSError if a rename onto the path would remove a device or a pipe for the whole machine."""
    kind = not_a_file(path) if path.exists() else None
    if path.absolute().parent == Path("/dev"):  # /dev/stdout is a link that may lead to a regular file
        kind = "a device"
    if kind:
        raise OSError(errno.EINVAL, f"it is {kind}; name a file")


class Kind(NamedTuple):
    """A kind of file that a script writes. The script overwrites files of this kind only."""

    name: str  # such as "a report of a run"
    starts: tuple[bytes, ...]  # a file of this kind starts with one of these
    has: bytes = b""  # and it contains this text in its first BYTES_THAT_TELL bytes


def is_of_kind(path: Path, kind: Kind) -> bool:
    """Return whether the start of the file matches this kind."""
    with open(path, "rb", opener=without_waiting) as file:
        first = file.read(BYTES_THAT_TELL)
    return first.startswith(kind.starts) and kind.has in first


def refuse_other_kind(flag: str, path: Path, kind: Kind, remedy: str = "name another file") -> None:
    """Raise ConfigError if the path is a file of another kind, which would be lost. Empty files may be replaced."""
    if path.is_file() and path.stat().st_size and not is_of_kind(path, kind):
        raise ConfigError(f"{flag}: {path} exists and is not {kind.name}; {remedy}")


def without_waiting(path: str, flags: int) -> int:
    """Open a file as an `opener` for `open`, without waiting for the writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


class LineFile:
    """A text file to which a run appends lines.

    On a full disk, it keeps the lines and writes them with the next ones.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "ab", buffering=0, opener=without_waiting)  # noqa: SIM115
        self._unwritten = b""

    def write(self, lines: str) -> None:
        """Append whole lines at once. Raise OSError if they cannot be written."""
        self._unwritten += lines.encode()
        while self._unwritten:
            count = self._file.write(self._unwritten)
            if count is None:  # a pipe that is full
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.path))
            self._unwritten = self._unwritten[count:]

    def close(self) -> None:
        """Close the file. Raise OSError if lines could not be written."""
        try:
            if self._unwritten:
                self.write("")
        finally:
            self._unwritten = b""
            self._file.close()


def or_shipped(path: Path) -> Path:
    """Return the path, or the file of this name that comes with halfstep if there is no such path."""
    own = HALFSTEP / path
    is_shipped = path.parts[:1] in SHIPPED_FOLDERS and ".." not in path.parts and own.is_file()
    return own if is_shipped and not path.exists() else path


def short_name(path: Path) -> str:
    """Return the short name of a file of halfstep, such as configs/vit_digits.yaml, or else the whole path."""
    if path.is_relative_to(HALFSTEP):
        name = path.relative_to(HALFSTEP)
        if name.parts[:1] in SHIPPED_FOLDERS and or_shipped(name).samefile(path):
            return str(name)
    return str(path)


def content_of(path: Path, most: int = 2**30, takes: tuple[str | None, ...] = (None,)) -> bytes:
    """Return the bytes of a file. Raise OSError if the file is larger than `most` bytes or of a kind not in `takes`.

    `takes`: the accepted kinds, as `not_a_file` returns them; by default regular files. Other kinds may be endless.
    """
    if (kind := not_a_file(path)) not in takes:
        raise OSError(errno.EINVAL, f"it is {kind}; name a file", str(path))
    with open(path, "rb", opener=without_waiting) as file:
        # A pipe is either at its end or has a writer to wait for, as in -list <(find photos).
        os.set_blocking(file.fileno(), kind == "a pipe")
        size = os.fstat(file.fileno()).st_size
        limit = most + 1 if kind else -1
        content = file.read(limit) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EINVAL, "it is too large; name another file", str(path))
    return content


def read_names(path: Path, errors: str = "strict") -> str:
    """Return the text of a file or pipe that lists names. Raise OSError if it is too large, ConfigError if not text."""
    return names_in(content_of(path, MOST_NAMES, (None, "a pipe")), errors, str(path))


def names_in(content: bytes, errors: str, path: str) -> str:
    """Decode the content of a file that lists names. Raise ConfigError if it is not text."""
    if b"\0" in content:
        raise ConfigError(f"{path} contains a zero byte, so it is UTF-16 or not a text file; save it as UTF-8 text")
    return content.decode("utf-8-sig", errors)


def sync(file: IO[bytes]) -> None:
    """Flush the file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_text(path: Path, text: str, check: Callable[[], None] = lambda: None, *, shared: bool = False) -> None:
    """Replace a file. See `replacing` for `check` and `shared`."""
    with replacing(path, check=check, shared=shared) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, which makes a rename in it durable. Some shared folders cannot be flushed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # as in PostgreSQL
            raise
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that can be written to a folder, which need not exist yet."""
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


# --- the lock of a folder ---


LOCK = ".lock"  # the file that a run locks in its folder


class FolderMoved(UserError):
    """An error for a run or sweep whose folder is no longer at its path."""

    code = 1


class FolderLock:
    """The lock file of a folder, recognised by its inode."""

    def __init__(self, folder: Path, lock: str = LOCK, setting: str = "SAVE"):
        """Remember the lock. Error messages name the setting with the folder's path."""
        self._folder, self._path, self._setting = folder, folder / lock, setting
        try:
            self._lock = os.stat(self._path)
        except OSError:  # a lock from another machine may not be visible here yet
            self._lock = None

    def check(self) -> None:
        """Raise FolderMoved if the path no longer leads to this lock. Call it before writing something that matters."""
        if self._lock is None:
            return
        try:
            is_ours = os.path.samestat(os.stat(self._path), self._lock)
        except (FileNotFoundError, NotADirectoryError):
            is_ours = False
        except OSError:  # the disk does not respond; the next write reports it
            return
        if not is_ours:
            raise FolderMoved(
                f"{self._setting}: {self._folder} was moved or deleted, or something else uses it now, so nothing more "
                "is saved there; start again with the folder's new path to continue from the last save"
            )
