"""The base class of all trackers, and what they receive: rows of metrics and the end of a run."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import Config
from configs.values import flatten
from engine.record.saved_files import read_object
from utils.files import write_text
from utils.text import redacted

PROJECT = "halfstep"
IS_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.I)  # matches names of environment variables that hold secrets
SHORTEST_SECRET = 6  # characters; a shorter value may occur in ordinary words


class TrackedRow(NamedTuple):
    """Metrics of one update ("step") or one epoch, with their names on a tracker."""

    axis: str
    number: int  # number of the update or epoch
    figures: dict[str, float]


class Ending(NamedTuple):
    """How a run ended. `state`: done, failed, or stopped (it can be resumed)."""

    state: str
    best: Mapping[str, Any]  # the figures of the best epoch; empty if there is none
    pictures: Sequence[Path]


class Tracker:
    """Base class of the trackers. Each tracker's methods are called in its own thread; any exception ends the tracker.

    `tracking/NAME.json` in the run's folder holds the run's ID on the tracker and the numbers of the last rows
    sent. A resumed run continues after these rows.
    """

    def __init__(self, name: str, config: Config, folder: Path):
        self.name, self.folder = name, folder
        given = flatten(config).items()
        self.settings = {key: without_secrets(value) if isinstance(value, str) else value for key, value in given}
        self._file = folder / "tracking" / f"{name}.json"
        saved = read_object(self._file)
        self.identity: str | None = saved.get("id")
        # Rows up to these numbers were sent already, and are not sent again.
        self.last = {axis: saved.get(axis, -1) for axis in ("step", "epoch")}

    def open(self) -> str:
        """Import the library and connect. Return a log message that says where to see the run."""
        raise NotImplementedError

    def add(self, rows: Sequence[TrackedRow]) -> None:
        raise NotImplementedError

    def go_back(self, step: int, epoch: int) -> None:
        """Handle a start at this update, or a rollback to it. Most trackers cannot delete figures, and do nothing."""

    def end(self, ending: Ending) -> None:
        raise NotImplementedError

    def remember(self) -> None:
        """Save the run's ID and the numbers of the last rows sent, for a resumed run."""
        if self.identity:
            self._file.parent.mkdir(exist_ok=True)
            write_text(self._file, json.dumps({"id": self.identity, **self.last}) + "\n")


def without_secrets(text: str) -> str:
    """Return the text without credentials in URLs, and without the values of secret environment variables."""
    for name, value in os.environ.items():
        if IS_SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    return redacted(text)
