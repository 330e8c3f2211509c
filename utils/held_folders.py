"""Folders that this process writes to. If a folder is moved, nothing is written to a new folder at its old path."""

import contextlib
import fcntl
import os
import shlex
import sys
from pathlib import Path

from utils.errors import UserError

LOCK = ".lock"  # the file that a run locks in its folder


class FolderMoved(UserError):
    """An error for a run whose folder is no longer at its path. The run ends, so that it writes nothing there."""

    code = 1


class HeldFolder:
    """An open folder, recognised by its inode and the inode of its lock even if its path changes."""

    def __init__(self, path: Path, setting: str = "SAVE", user: str = "run"):
        """Open the folder. Error messages name the setting with its path, and the `user` that writes to it."""
        self.path, self._setting, self._user = path, setting, user
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder, self._lock = os.fstat(self._descriptor), None
        with contextlib.suppress(OSError):  # a lock from another machine may not be visible here yet
            self._lock = os.stat(path / LOCK)
        _held.append(self)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this folder and to the lock of this run.

        A deleted lock does no harm until another run creates a new one.
        """
        try:
            if not os.path.samestat(os.stat(self.path), self._folder):
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the disk does not respond; the next write reports it
            return True
        with contextlib.suppress(OSError):
            return self._lock is None or os.path.samestat(os.stat(self.path / LOCK), self._lock)
        return True

    def error(self) -> FolderMoved:
        """Return the error for a moved folder, with the folder's current path."""
        place, ends = self._place(), f"while this {self._user} wrote to it, so this {self._user} ends"
        start = f"{self._setting}: {self.path}"
        if place is None:
            return FolderMoved(f"{start} was deleted or moved {ends}; start the {self._user} again")
        if place == self.path.absolute():
            return FolderMoved(
                f"{self._setting}: another run took over {self.path} {ends}; wait until the other run ends"
            )
        has_save = (place / "last.pth").exists()
        then = f"; -resume {shlex.quote(str(place))} continues from its last save" if has_save else ""
        return FolderMoved(f"{start} was moved to {place} {ends}{then}")

    def _place(self) -> Path | None:
        """Return the current path of the folder, or None if it was deleted or the system does not report it."""
        with contextlib.suppress(OSError):
            if sys.platform == "darwin":
                path = fcntl.fcntl(self._descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
            else:
                path = os.readlink(f"/proc/self/fd/{self._descriptor}")
            if os.path.samestat(os.stat(path), self._folder):
                return Path(path)
        return None

    def write_text(self, name: str, text: str) -> None:
        """Replace a file of this folder, even if the folder was moved."""
        temporary = f".{name}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o666, dir_fd=self._descriptor), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        os.fsync(self._descriptor)

    def release(self) -> None:
        """Close the folder at the end of the run."""
        _held.remove(self)
        os.close(self._descriptor)


_held: list[HeldFolder] = []


def is_in_place(path: Path) -> bool:
    """Return False if the path is in a held folder that was moved, else True."""
    return _moved(path) is None


def check_in_place(path: Path) -> None:
    """Raise FolderMoved if the path is in a held folder that was moved. Call it before every write."""
    if moved := _moved(path):
        raise moved.error()


def _moved(path: Path) -> HeldFolder | None:
    around = (path, *path.parents)
    return next((each for each in _held if each.path in around and not each.is_in_place()), None)
