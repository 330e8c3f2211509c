"""A run: its identity, and how a user names it: by its folder, a checkpoint in it, or the word latest."""

import os
import re
import secrets
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import ConfigError

BEST, LAST = "best.pth", "last.pth"
LATEST = "latest"
FILES_OF_A_RUN = ("status.json", "config.yaml", ".lock")
OUTPUT = "output"  # where runs are by default
EMPTY_NAME = "a run or file has an empty name, as of a shell variable that is not set; name one"
# train-DATE, and train-DATE.2 of the same second. A copy of a run often has a suffix: train-DATE-backup.
DATED = re.compile(r"[a-z]+-(\d{8}-\d\d-\d\d-\d\d)(-.+?)?(?:\.(\d+))?")


class Identity(NamedTuple):
    """What a run keeps from its first start on, in status.json and in its checkpoints, under the key `run`."""

    id: str
    name: str  # of the folder in which it began
    began: str  # when, in UTC

    @classmethod
    def new(cls, folder: Path) -> "Identity":
        return cls(secrets.token_hex(8), folder.name, utc_now())

    @classmethod
    def of(cls, record: Any) -> "Identity | None":
        """Return the identity in the content of status.json or of a checkpoint; None if it has none or is damaged."""
        known = record.get("run") if isinstance(record, dict) else None
        found = [known.get(name) for name in cls._fields] if isinstance(known, dict) else [None]
        return cls(*found) if all(isinstance(each, str) for each in found) else None

    def saved_now(self) -> dict[str, str]:
        """Return what a checkpoint that is written now says of its run."""
        return {**self._asdict(), "saved": utc_now()}


def utc_now() -> str:
    return datetime.now(UTC).isoformat()


def is_run_folder(folder: str | Path) -> bool:
    """Return whether this is the folder of a run."""
    # Class folders have neither, so that thousands of them cost two questions each.
    found = [name for name in FILES_OF_A_RUN[:2] if os.path.exists(os.path.join(folder, name))]
    return bool(found) and has_files_of_run([*found, *os.listdir(folder)])


def has_files_of_run(names: Collection[str]) -> bool:
    """Return whether a folder with files of these names is that of a run. A copy may lack one of them."""
    return sum(each in names for each in FILES_OF_A_RUN) > 1


def without_latest(source: str | Path, save: str = OUTPUT) -> str:
    """The folder of the newest run in `save` in place of the word latest; anything else, and a file of that name, as it is.

    Raise ConfigError for an empty name, which Path would take for the current folder.
    """
    if not str(source).strip():
        raise ConfigError(EMPTY_NAME)
    if str(source) != LATEST or Path(LATEST).exists():
        return str(source)
    from utils.run_copies import newest_first

    settings = Path(save).expanduser().glob("*/config.yaml")
    runs = newest_first(file.parent for file in settings if weights_in(file.parent))
    if not runs:
        raise ConfigError(f"{LATEST}: there is no run with a checkpoint in {save}; name the folder of one")
    return str(runs[0].folder)


def weights_in(folder: str | Path) -> Path | None:
    """The best weights of a run by its folder, before there are any the last; None if there are none."""
    return next((file for name in (BEST, LAST) if (file := Path(folder) / name).is_file()), None)


def is_checkpoint_of_run(path: Path) -> bool:
    """Return whether the path has the name of a checkpoint that the run in its folder writes."""
    is_named = re.fullmatch(r"(best|last|previous|checkpoint-\d+)\.pth", path.name)
    return bool(is_named) and (path.parent / "config.yaml").exists()


def folder_of(source: str | Path) -> Path:
    """The folder of the run that is named."""
    path = Path(without_latest(source)).expanduser()
    return path.parent if path.suffix == ".pth" and (path.parent / "config.yaml").exists() else path
