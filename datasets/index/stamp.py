"""Stamps of the files and folders that an index was built from, which tell whether they are still the same."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from utils.errors import DataError
from utils.files import file_clock_ns

# File systems note the time of a change in steps of up to 2 s (FAT). A change within the same step as one before is not
# seen, so what was read so shortly after a change is not known by its date alone.
NANOSECONDS_OF_DOUBT = 2_000_000_000


class FileStamp(NamedTuple):
    """Path, size and date of a file when it was indexed."""

    path: Path
    size: int
    mtime_ns: int


def changed_during_run(file: Path | str) -> DataError:
    return DataError(f"{file} was changed during this run; start again, with -resume to continue")


def stamps_of(files: Iterable[Path]) -> list[list]:
    """Their FileStamps in the plain values of an index's facts."""
    stats = ((file, file.stat()) for file in files)
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def stamps_in(facts: list[list]) -> list[FileStamp]:
    """The FileStamps of what `stamps_of` returned."""
    return [FileStamp(Path(path), size, mtime_ns) for path, size, mtime_ns in facts]


def stamp_of_file(file: Path) -> dict:
    """What `is_same_file` needs, to be taken before the file is read."""
    read, status = file_clock_ns(), file.stat()
    # The date of the last change, which no program can set back, as it can the date of the content.
    return {
        "name": file.name,
        "size": status.st_size,
        "date": status.st_ctime_ns,
        "read": read,
        "checksum": _hash(file),
    }


def is_same_file(stamp: dict, file: Path) -> bool:
    """Whether the file is as it was read then: by its date, and where that is another, as of a copy, by its bytes."""
    status = file.stat()
    if (file.name, status.st_size) != (stamp["name"], stamp["size"]):
        return False
    is_dated = status.st_ctime_ns == stamp["date"] < stamp["read"] - NANOSECONDS_OF_DOUBT
    return is_dated or _hash(file) == stamp["checksum"]


def _hash(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def dates_of_folders(root: Path, folders: Iterable[str]) -> list[int]:
    """When anything was last added to each folder, renamed or removed in it, in nanoseconds."""
    return [os.stat(os.path.join(root, folder)).st_mtime_ns for folder in folders]


def seconds_of_doubt(dates: Iterable[int], started: int) -> float:
    """How long to wait, before folders of these dates are listed again, until their dates tell every later change.

    0 if they were listed from `started` on, long enough after their last change.
    """
    return min(max(max(dates, default=0) + NANOSECONDS_OF_DOUBT - started, 0), NANOSECONDS_OF_DOUBT) / 1e9
