"""Finds the copies of a run in several folders, and sorts runs by their last save."""

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from utils.files import content_of
from utils.runs import DATED, Identity, weights_in

LARGEST = 2**26  # maximum bytes of a status.json


class RunCopy(NamedTuple):
    """A folder with a run or a copy of a run, as described by its status.json."""

    folder: Path
    id: str
    name: str  # name of the folder in which the run started; "" if status.json lacks it
    is_original: bool  # whether the folder still has its original name
    began: float  # the first start, in seconds since 1970
    saved: float  # the last save, in seconds since 1970
    step: int
    number: int  # distinguishes folders created in the same second

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
        """Return a log line about this folder for a run that continues in another folder."""
        saved = datetime.fromtimestamp(self.saved, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{self.folder} is another copy of this run: step {self.step}, saved {saved}; pass that folder to use it"


def _time_of(folder: Path, text: Any) -> float:
    """Return the time that a string contains, in seconds since 1970.

    Without a valid string (status.json is missing or damaged), return the local time in the folder's name, else the
    date of config.yaml, else 0.
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
    """Return the runs in these folders by last save, newest first. At equal times, the run with more updates is first.

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
    """Return the copies. If status.json is unreadable, take the identity from a copy that names the folder."""
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
    neighbours = [file.parent for file in folder.parent.glob("*/status.json") if weights_in(file.parent)]
    copies = newest_first({*neighbours, folder})
    own_id = next(copy.id for copy in copies if copy.folder == folder)
    return [copy for copy in copies if copy.id == own_id and copy.folder != folder]
