"""Runs: their identity, their copies, and their names (a folder, a checkpoint in it, or the word latest)."""

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import ConfigError
from utils.files import content_of

BEST, LAST = "best.pth", "last.pth"
LATEST = "latest"
FILES_OF_A_RUN = ("status.json", "config.yaml", ".lock")
OUTPUT = "output"  # the default folder for runs
EMPTY_NAME = "the name of a run or file is empty, perhaps because a shell variable is not set; give a name"
LARGEST = 2**26  # bytes of a status.json
# train-DATE, or train-DATE.2 for a second run in the same second. Copies often have a suffix: train-DATE-backup.
DATED = re.compile(r"[a-z]+-(\d{8}-\d\d-\d\d-\d\d)(-.+?)?(?:\.(\d+))?")


class Identity(NamedTuple):
    """The identity of a run since its first start, stored in status.json and in its checkpoints under the key `run`."""

    id: str
    name: str  # of the folder in which the run started
    began: str  # the time of the first start, in UTC

    @classmethod
    def new(cls, folder: Path) -> "Identity":
        return cls(secrets.token_hex(8), folder.name, utc_now())

    @classmethod
    def of(cls, record: Any) -> "Identity | None":
        """Return the identity in status.json or a checkpoint, or None if there is none or it is damaged."""
        known = record.get("run") if isinstance(record, dict) else None
        found = [known.get(name) for name in cls._fields] if isinstance(known, dict) else [None]
        return cls(*found) if all(isinstance(each, str) for each in found) else None

    def saved_now(self) -> dict[str, str]:
        """Return the identity as a dict for a checkpoint that is written now."""
        return {**self._asdict(), "saved": utc_now()}


class RunCopy(NamedTuple):
    """A folder with a run or a copy of a run, as described by its status.json."""

    folder: Path
    id: str
    name: str  # of the folder in which the run started; "" if status.json does not have it
    is_original: bool  # whether the folder still has this name
    began: float  # the first start, in seconds since 1970
    saved: float  # the last save, in seconds since 1970
    step: int
    number: int  # distinguishes folders of the same second

    @classmethod
    def at(cls, folder: Path) -> "RunCopy":
        status: Any = None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            status = json.loads(content_of(folder / "status.json", LARGEST))
        status = status if isinstance(status, dict) else {}
        known, dated = Identity.of(status), DATED.fullmatch(folder.name)
        step = status.get("step")
        return cls(
            folder=folder,
            id=known.id if known else str(folder),
            name=known.name if known else "",
            is_original=known is not None and known.name == folder.name,
            began=_time_of(folder, known.began if known else None),
            saved=_time_of(folder, status["run"].get("saved") if known else None),
            step=step if isinstance(step, int) else 0,
            number=int(dated[3] or 1) if dated else 0,
        )

    def describe(self) -> str:
        """Return a log line for a run that continues in another copy."""
        saved = datetime.fromtimestamp(self.saved, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.folder} is another copy of this run: step {self.step}, saved {saved}; name that folder to use it"


def utc_now() -> str:
    return datetime.now(UTC).isoformat()


def _time_of(folder: Path, text: Any) -> float:
    """Return the time in a text, in seconds since 1970.

    If status.json is missing or damaged there is no text. Then return the date in the folder's name by this machine's
    clock, else the date of config.yaml, else 0.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    if dated := DATED.fullmatch(folder.name):
        with contextlib.suppress(ValueError, OverflowError):
            return time.mktime(time.strptime(dated[1], "%Y%m%d-%H-%M-%S"))
    with contextlib.suppress(OSError):
        return (folder / "config.yaml").stat().st_mtime
    return 0.0


def newest_first(folders: Iterable[Path]) -> list[RunCopy]:
    """Return the runs in these folders, sorted by their last save, newest first. More updates win at equal times.

    All copies of a run are adjacent. The first of them is in the folder with the run's original name, because users who
    copy a run continue in the original.
    """

    def by_time(copy: RunCopy) -> tuple:
        dated = DATED.fullmatch(copy.folder.name)
        has_suffix = dated is not None and dated[2] is not None  # for example train-20260102-03-04-05-backup
        return copy.saved, copy.step, not has_suffix, copy.number, copy.folder.name

    runs: dict[str, list[RunCopy]] = {}
    for copy in _with_lost_identities([*map(RunCopy.at, folders)]):
        runs.setdefault(copy.id, []).append(copy)
    for copies in runs.values():
        copies.sort(key=lambda copy: (copy.is_original, *by_time(copy)), reverse=True)
    ordered = sorted(runs.values(), key=lambda copies: by_time(copies[0]), reverse=True)
    return [copy for copies in ordered for copy in copies]


def _with_lost_identities(copies: Sequence[RunCopy]) -> list[RunCopy]:
    """Return the copies. A folder without a readable status.json counts as the original of a copy that names it."""
    lost = {copy.folder: copy for copy in copies if not copy.name}
    for copy in copies:
        folder = copy.folder.with_name(copy.name) if copy.name else copy.folder
        if folder != copy.folder and folder in lost:
            saved = max(copy.saved, lost[folder].saved)
            lost[folder] = copy._replace(folder=folder, is_original=True, saved=saved)
    return [lost.get(copy.folder, copy) for copy in copies]


def other_copies(folder: str | Path) -> list[RunCopy]:
    """Return the copies of a run that are next to its folder and have weights."""
    folder = Path(folder)
    beside = [file.parent for file in folder.parent.glob("*/status.json") if weights_in(file.parent)]
    copies = newest_first({*beside, folder})
    own_id = next(copy.id for copy in copies if copy.folder == folder)
    return [copy for copy in copies if copy.id == own_id and copy.folder != folder]


def is_run_folder(folder: str | Path) -> bool:
    """Return whether this is the folder of a run."""
    # Folders of classes have neither file, so that thousands of them cost only two checks each.
    found = [name for name in FILES_OF_A_RUN[:2] if os.path.exists(os.path.join(folder, name))]
    return bool(found) and has_files_of_run([*found, *os.listdir(folder)])


def has_files_of_run(names: Collection[str]) -> bool:
    """Return whether a folder with files of these names is the folder of a run. A copy may lack one of the files."""
    return sum(each in names for each in FILES_OF_A_RUN) > 1


def without_latest(source: str | Path, save: str = OUTPUT) -> str:
    """Return the folder of the newest run in `save` for the word latest, and any other name or existing file unchanged.

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
    return str(runs[0].folder)


def weights_in(folder: str | Path) -> Path | None:
    """Return the file with the best weights in a run's folder, else with the last weights, else None."""
    return next((file for name in (BEST, LAST) if (file := Path(folder) / name).is_file()), None)


def is_checkpoint_of_run(path: Path) -> bool:
    """Return whether the path is named like a checkpoint and is in the folder of a run."""
    is_named = re.fullmatch(r"(best|last|previous|checkpoint-\d+)\.pth", path.name)
    return bool(is_named) and (path.parent / "config.yaml").exists()


def folder_of(source: str | Path) -> Path:
    """Return the folder of a run that is named by `latest`, its folder or its checkpoint."""
    path = Path(without_latest(source)).expanduser()
    return path.parent if path.suffix == ".pth" and (path.parent / "config.yaml").exists() else path
