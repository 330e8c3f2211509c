"""A bounded folder of whole tars from a server, shared by all processes of a host and by runs of the same data.

A file's name holds the version of the tar, so what is there under its name is right and whole. A tar is written under
the name `.NAME.part`, locked, and renamed: what is left of a killed process is written anew. A process that reads a tar
while another drops it keeps reading, since it has opened it.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from datasets.sources.remote.server import Server
from utils.errors import DataError, cause_of
from utils.files import file_clock_ns, sync
from utils.text import format_bytes

DATE_NS = 10**18  # of each tar here: in 2001, which every file system can store
PART = ".part"  # ending of what is not whole yet
VERSION_DIGITS = 12  # of a hash, in the names of files


class RemoteTar(NamedTuple):
    """A tar on the server."""

    name: str  # below the server's folder
    size: int
    version: str  # VERSION_DIGITS hexadecimal digits, other ones for another content


class TarCache:
    """The tars of one server's folder, of which at most `limit` bytes are kept."""

    def __init__(self, folder: Path, server: Server, limit: int = 0):
        self.folder, self.server, self.limit = folder, server, limit
        self.tars_folder = folder / "tars"

    def path(self, tar: RemoteTar) -> Path:
        return Path(f"{self.tars_folder}/{tar.name[: -len('.tar')]}.{tar.version}.tar")

    def holds(self, tar: RemoteTar) -> bool:
        """Whether the tar is there. One that a crash of the machine left short is removed."""
        path = self.path(tar)
        try:
            is_whole = path.stat().st_size == tar.size
        except FileNotFoundError:
            return False
        if not is_whole:
            path.unlink(missing_ok=True)
        return is_whole

    def use(self, tar: RemoteTar) -> None:
        """Note that the tar is in use: the tars that were used longest ago are dropped first."""
        with contextlib.suppress(OSError):
            os.utime(self.path(tar), ns=(file_clock_ns(), DATE_NS))

    def pull(
        self,
        tar: RemoteTar,
        check: Callable[[Path], None] = lambda path: None,
        keep: Collection[Path] = (),
        waits: bool = True,
    ) -> bool:
        """Make sure that the tar is here. `check` raises DataError if a file is not this tar.

        `keep`: tars that are not dropped for it. Unless it `waits`, returns False if another process is pulling it.
        """
        path = self.path(tar)
        part = path.with_name(f".{path.name}{PART}")
        while not self.holds(tar):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with _locked(part, waits) as file:
                    if file is None:
                        return False
                    if not self.holds(tar):
                        file.truncate(tar.size)  # so that it counts as that for others who make room
                        self.drop_oldest(self.limit, keep)
                        self._write(file, part, tar, check)
                        os.replace(part, path)
            except OSError as error:
                if error.errno == errno.ENOSPC and self.drop_oldest(self.size() - tar.size, keep):
                    continue
                raise DataError(
                    f"{self.server.url_of(tar.name)} cannot be kept in {self.folder} ({cause_of(error)}); set DATA.CACHE_PATH "
                    "to a folder with room, or DATA.REMOTE_CACHE_GB to less"
                ) from error
        return True

    def _write(self, file: BinaryIO, part: Path, tar: RemoteTar, check: Callable[[Path], None]) -> None:
        try:
            self.server.copy(tar.name, tar.size, file)
            sync(file)
            os.utime(part, ns=(file_clock_ns(), DATE_NS))
            check(part)
        except BaseException:
            part.unlink()
            raise

    def tars(self) -> dict[Path, os.stat_result]:
        """The files of all tars here, and of those that are being pulled."""
        found = {}
        for folder, _, names in os.walk(self.tars_folder):
            for name in names:
                if name.endswith((".tar", PART)):
                    with contextlib.suppress(FileNotFoundError):
                        found[Path(folder, name)] = os.stat(os.path.join(folder, name))
        return found

    def size(self) -> int:
        return sum(each.st_size for each in self.tars().values())

    def drop_oldest(self, limit: int, keep: Collection[Path] = ()) -> int:
        """Remove what was used longest ago until at most `limit` bytes are left. Returns how many were removed."""
        found = self.tars()
        total = sum(each.st_size for each in found.values())
        dropped = 0
        for path in sorted(found, key=lambda path: found[path].st_atime_ns):
            if total <= limit:
                break
            if path in keep or path.suffix == PART:
                continue
            path.unlink(missing_ok=True)
            total -= found[path].st_size
            dropped += 1
        return dropped

    def remove_left(self) -> None:
        """Remove parts that no process is writing."""
        for part in (path for path in self.tars() if path.suffix == PART):
            with contextlib.suppress(OSError), _locked(part, waits=False) as file:
                if file is not None:
                    part.unlink()

    def describe(self, tars: Collection[RemoteTar]) -> str:
        """How much of these tars is here."""
        held = [tar for tar in tars if self.holds(tar)]
        return (
            f"{len(held):,} of {len(tars):,} tars, {format_bytes(sum(tar.size for tar in held))} of "
            f"{format_bytes(sum(tar.size for tar in tars))}, are in {self.folder}"
        )


@contextlib.contextmanager
def _locked(part: Path, waits: bool) -> Iterator[BinaryIO | None]:
    """The file, opened for writing and locked against other threads and processes; None if it is locked and not `waits`.

    The system frees a lock even after kill -9.
    """
    while True:
        with open(part, "wb", opener=_without_truncating) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            try:
                if not _is_at(file, part):  # its former owner renamed or removed it
                    continue
                yield file
                return
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile would keep it


def _without_truncating(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
