"""The identity of runs, how users name them (a folder, a checkpoint in it, `latest`), and facts about their images."""

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import ConfigError
from utils.files import content_of, without_waiting

BEST, LAST = "best.pth", "last.pth"
CHOICE = "choice.json"  # in the folder of a run whose weights its images have chosen
LATEST = "latest"
FILES_OF_A_RUN = ("status.json", "config.yaml", ".lock")
OUTPUT = "output"  # the default folder for runs
EMPTY_NAME = "the name of a run or file is empty, perhaps because a shell variable is not set; give a name"
# train-DATE, or train-DATE.2 for a second run in the same second. Copies often have a suffix: train-DATE-backup.
DATED = re.compile(r"[a-z]+-\d{8}-\d\d-\d\d-\d\d([-.].+)?")
LARGEST_STATUS = 2**26  # maximum bytes of a status.json
OLD_VERSIONS = ("1.", "2.")  # the start of the versions whose runs are refused


class Identity(NamedTuple):
    """The identity of a run since its first start, stored in status.json and in its checkpoints under the key `run`."""

    id: str
    name: str  # name of the folder in which the run started
    began: str  # the time of the first start, in UTC

    @classmethod
    def new(cls, folder: Path) -> "Identity":
        return cls(secrets.token_hex(8), folder.name, utc_now())

    @classmethod
    def of(cls, record: Any) -> "Identity | None":
        """Return the identity in status.json or a checkpoint, or None if it is missing or damaged."""
        known = record.get("run") if isinstance(record, dict) else None
        values = [known.get(name) for name in cls._fields] if isinstance(known, dict) else [None]
        return cls(*values) if all(isinstance(each, str) for each in values) else None


def utc_now() -> str:
    return datetime.now(UTC).isoformat()


def is_run_folder(folder: str | Path) -> bool:
    """Return whether this is the folder of a run."""
    # A class folder has neither status.json nor config.yaml, so it costs only two checks. There may be thousands.
    names = [name for name in FILES_OF_A_RUN[:2] if os.path.exists(os.path.join(folder, name))]
    return bool(names) and has_files_of_run([*names, *os.listdir(folder)])


def has_files_of_run(names: Collection[str]) -> bool:
    """Return whether a folder with files of these names is the folder of a run. A copy may lack one of the files."""
    return sum(each in names for each in FILES_OF_A_RUN) > 1


def without_latest(source: str | Path, save: str = OUTPUT) -> str:
    """Return `source`, or the folder of the newest run in `save` if `source` is `latest` and there is no such path.

    Raise ConfigError for an empty name, which Path would treat as the current folder.
    """
    if not str(source).strip():
        raise ConfigError(EMPTY_NAME)
    if str(source) != LATEST or Path(LATEST).exists():
        return str(source)
    settings = Path(save).expanduser().glob("*/config.yaml")
    runs = newest_first(file.parent for file in settings if weights_in(file.parent))
    if not runs:
        raise ConfigError(f"{LATEST}: there is no run with a checkpoint in {save}; give the folder of a run")
    return str(runs[0])


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of runs by their last save, newest first. At equal times, a run precedes its copies.

    Without a readable time in status.json, the date of the weights, or else of config.yaml, counts.
    """

    def order(folder: Path) -> tuple[float, bool, str]:
        status = status_in(folder)
        known, saved = Identity.of(status), 0.0
        with contextlib.suppress(OSError):
            saved = (weights_in(folder) or folder / "config.yaml").stat().st_mtime
        if known:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                saved = datetime.fromisoformat(status["run"]["saved"]).timestamp()
        return saved, known is not None and known.name == folder.name, folder.name

    return sorted(folders, key=order, reverse=True)


def status_in(folder: Path) -> dict[str, Any]:
    """Return the content of status.json, or {} if it cannot be read."""
    status: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        status = json.loads(content_of(folder / "status.json", LARGEST_STATUS))
    return status if isinstance(status, dict) else {}


def refuse_old_run(run: Path, version: str | None) -> None:
    """Raise ConfigError if halfstep 1.x or 2.x wrote a run. `version`: as in status.json, which adds the commit."""
    if version and version.startswith(OLD_VERSIONS):
        raise ConfigError(
            f"{run}: halfstep {version.partition(',')[0]} wrote this run, and 2.3.0 is the last version that reads it; "
            "use that version, or start a new run from its weights with -pretrained"
        )


def is_locked(folder: Path) -> bool:
    """Return whether a run is using the folder: false if nobody has used it, or if the file system has no locks.

    The lock file is only read, because the folder may belong to another user.
    """
    try:
        with open(folder / ".lock", "rb", opener=without_waiting) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def weights_in(folder: str | Path) -> Path | None:
    """Return the file with the best weights in a run's folder, else with the last weights, else None."""
    return next((file for name in (BEST, LAST) if (file := Path(folder) / name).is_file()), None)


def folder_of(source: str | Path) -> Path:
    """Return the folder of a run. `source` is `latest`, the folder of a run, or one of its checkpoints."""
    path = Path(without_latest(source)).expanduser()
    return path.parent if path.suffix == ".pth" and (path.parent / "config.yaml").exists() else path


# --- the facts that a run records about its images, as {fact: value} ---


SIZES = "sizes of the "  # prefix of facts whose value is a list of file sizes, separated by spaces
OF_A_PART = "names of the {} images", "labels of the {} images", f"{SIZES}{{}} files"
NUMBERS = {f"{part} images": [fact.format(part) for fact in OF_A_PART] for part in ("training", "validation")}
FACTS_OF_IMAGES = [fact for facts in NUMBERS.values() for fact in facts]
