"""Detects that the folder to which a program writes was moved or deleted, or that another program uses it."""

import os
from pathlib import Path

from utils.errors import UserError

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
                f"{self._setting}: {self._folder} was moved or deleted, or something else uses it now, so nothing more is "
                "saved there; start again with the folder's new path to continue from the last save"
            )
