"""A run: its identity, its copies, and how a user names it: by its folder, a checkpoint in it, or the word latest."""

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
OUTPUT = "output"  # where runs are by default
EMPTY_NAME = "a run or file has an empty name, as of a shell variable that is not set; name one"
LARGEST = 2**26  # bytes of a status.json
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


class RunCopy(NamedTuple):
    """A folder with a run, or a copy of one, as its status.json describes it."""

    folder: Path
    id: str
    name: str  # of the folder in which the run began; "" if status.json does not say
    is_original: bool  # the folder has this name
    began: float  # seconds since 1970
    saved: float  # the same, of its last save
    step: int
    number: int  # of several folders of one second

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
        """Return a line for the log of a run that goes on in another copy."""
        saved = datetime.fromtimestamp(self.saved, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.folder} is another copy of this run: step {self.step}, saved {saved}; name that folder to use it"


def utc_now() -> str:
    return datetime.now(UTC).isoformat()


def _time_of(folder: Path, text: Any) -> float:
    """Return the time in a text, in seconds since 1970.

    Without a time, because status.json is missing or damaged: the date in the folder's name, by the clock of this
    machine, else the date of config.yaml, else 0.
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
    """Return the runs in these folders, the one that was saved last first, of equal times the one with more updates.

    All copies of a run stand together. The first of them is in the folder of the run's own name; whoever copies a run
    goes on in the original.
    """

    def by_time(copy: RunCopy) -> tuple:
        dated = DATED.fullmatch(copy.folder.name)
        has_suffix = dated is not None and dated[2] is not None  # as in train-20260102-03-04-05-backup
        return copy.saved, copy.step, not has_suffix, copy.number, copy.folder.name

    runs: dict[str, list[RunCopy]] = {}
    for copy in _with_lost_identities([*map(RunCopy.at, folders)]):
        runs.setdefault(copy.id, []).append(copy)
    for copies in runs.values():
        copies.sort(key=lambda copy: (copy.is_original, *by_time(copy)), reverse=True)
    ordered = sorted(runs.values(), key=lambda copies: by_time(copies[0]), reverse=True)
    return [copy for copies in ordered for copy in copies]


def _with_lost_identities(copies: Sequence[RunCopy]) -> list[RunCopy]:
    """Return the copies, and take a folder without a readable status.json for the original of a copy that names it."""
    lost = {copy.folder: copy for copy in copies if not copy.name}
    for copy in copies:
        folder = copy.folder.with_name(copy.name) if copy.name else copy.folder
        if folder != copy.folder and folder in lost:
            saved = max(copy.saved, lost[folder].saved)
            lost[folder] = copy._replace(folder=folder, is_original=True, saved=saved)
    return [lost.get(copy.folder, copy) for copy in copies]


def other_copies(folder: str | Path) -> list[RunCopy]:
    """Return the copies of a run that lie beside its folder and have weights."""
    folder = Path(folder)
    beside = [file.parent for file in folder.parent.glob("*/status.json") if weights_in(file.parent)]
    copies = newest_first({*beside, folder})
    own_id = next(copy.id for copy in copies if copy.folder == folder)
    return [copy for copy in copies if copy.id == own_id and copy.folder != folder]


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
