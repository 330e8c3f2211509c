"""Sends the rows of steps.csv and metrics.csv to TensorBoard, Weights & Biases and MLflow.

Each tracker has a listener and a thread, so it cannot delay training.
"""

import contextlib
import importlib.util
import json
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import Config
from configs.values import flatten
from engine.record.saved_files import PICTURES, read_object
from engine.record.trackers.listeners import Ending, Listener, Start, TensorBoard, TrackedRow
from utils.commands import pip
from utils.distributed import Process
from utils.errors import ConfigError, ExitCode
from utils.files import write_text
from utils.log import Log
from utils.text import redacted

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # package names for pip; not in requirements.txt
PATIENCE = 10.0  # seconds without progress after which an ending run stops waiting for a tracker
LONGEST_END = 60.0  # maximum seconds that an ending run waits for a tracker that is still opening or sending
ROWS_AT_ONCE = 50  # maximum number of rows that a tracker gets in one call
# Columns of steps.csv that are sent to trackers. The columns *_pct are sent as well.
STEP_GROUP = ("lr", "loss", "grad_norm", "loss_scale", "skipped")
IS_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.I)  # matches names of environment variables that hold secrets
SHORTEST_SECRET = 6  # characters; a shorter value may occur in ordinary words


def wandb(folder: Path, settings: Mapping[str, Any], identity: str | None) -> Listener:
    from engine.record.trackers.wandb_listener import Wandb

    return Wandb(folder, settings, identity)


def mlflow(folder: Path, settings: Mapping[str, Any], identity: str | None) -> Listener:
    from engine.record.trackers.mlflow_listener import Mlflow

    return Mlflow(folder, settings, identity)


LISTENERS = {"tensorboard": TensorBoard, "wandb": wandb, "mlflow": mlflow}  # {value of TRACK: what makes its listener}


def check_trackers(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
    for name in PACKAGES.keys() & config.TRACK:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a spec without an origin is just a folder of that name
            raise ConfigError(f"TRACK: {name} needs the package {PACKAGES[name]}: {pip('install')} {PACKAGES[name]}")


class TrackerThread:
    """Feeds one listener from a queue. The first failure is logged as a warning and ends the listener, not the run.

    `tracking/NAME.json` in the run's folder holds the run's ID on the tracker and the numbers of the last rows sent. A
    resumed run continues after these rows.
    """

    def __init__(self, name: str, config: Config, folder: Path, log: Log):
        self._name, self._config, self._folder, self._log = name, config, folder, log
        self._file = folder / "tracking" / f"{name}.json"
        self._last = {"step": -1, "epoch": -1}  # rows up to these were sent already
        self._queue: queue.SimpleQueue[TrackedRow | Start | Ending] = queue.SimpleQueue()
        self._is_open, self._moved = False, time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: TrackedRow | Start | Ending) -> None:
        """Queue an item. An Ending is the last one."""
        if self._thread.is_alive():
            self._queue.put(item)

    def _run(self) -> None:
        try:
            saved = read_object(self._file)
            listener = LISTENERS[self._name](self._folder, shown_settings(self._config), saved.get("id"))
            if listener.place:
                self._log.say(f"{self._name}: {without_secrets(listener.place)}")
            if not listener.may_have_lost_rows:
                self._last = {axis: saved.get(axis, -1) for axis in self._last}
            self._remember(listener)
            self._is_open = True
            while self._handle(listener):
                self._moved = time.monotonic()
        except BaseException as error:  # libraries raise SystemExit, too
            reason = without_secrets(f"{type(error).__name__}: {error}".split("\n")[0])[:300]
            self._log.warn(f"{self._name}: {reason}; training continues without it")

    def _handle(self, listener: Listener) -> bool:
        """Send the rows in the queue, or handle another item. Return False after the last item."""
        rows, item = [], self._queue.get()
        while isinstance(item, TrackedRow):
            if item.number > self._last[item.axis]:
                rows.append(item)
            item = None if self._queue.empty() or len(rows) == ROWS_AT_ONCE else self._queue.get()
        if rows:
            listener.add(rows)
            self._last |= {row.axis: row.number for row in rows}
            self._remember(listener)
        if isinstance(item, Start) and listener.go_back(item.step):
            self._last = {"step": item.step - 1, "epoch": item.epoch - 1}
        if isinstance(item, Ending):
            listener.end(item)
        return not isinstance(item, Ending)

    def _remember(self, listener: Listener) -> None:
        """Save the run's ID and the numbers of the last rows sent, for a resumed run."""
        if listener.identity:
            self._file.parent.mkdir(exist_ok=True)
            write_text(self._file, json.dumps({"id": listener.identity, **self._last}) + "\n")

    def join(self, deadline: float) -> None:
        """Wait until everything is sent, but give up if the tracker hangs."""
        asked = time.monotonic()
        while self._thread.is_alive():
            # A tracker that is opening may be migrating a database, which must not be interrupted.
            patience = PATIENCE if self._is_open else LONGEST_END
            if time.monotonic() > min(deadline, max(asked, self._moved) + patience):
                self._log.warn(f"{self._name}: not everything was sent when the run ended")
                return
            self._thread.join(0.05)


class Trackers:
    """All trackers of a run. Processes other than the first have none."""

    def __init__(self, threads: Iterable[TrackerThread] = ()):
        self._threads = list(threads)

    def begin(
        self, step: int, epoch: int, steps: Sequence[Mapping[str, Any]], epochs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Report a start at this update and epoch, or a rollback to them. `steps`, `epochs`: all earlier rows."""
        self._put(Start(step, epoch))
        for axis, rows in (("step", steps), ("epoch", epochs)):
            for row in rows:
                self.add(axis, row)

    def add(self, axis: str, row: Mapping[str, float | None]) -> None:
        """Send a row of steps.csv ("step") or metrics.csv ("epoch")."""
        self._put(TrackedRow(axis, int(row[axis]), figures_of(axis, row)))

    def end(self, ending: Ending) -> None:
        self._put(ending)
        deadline = time.monotonic() + LONGEST_END
        for thread in self._threads:
            thread.join(deadline)

    def _put(self, item: TrackedRow | Start | Ending) -> None:
        for thread in self._threads:
            thread.put(item)


@contextlib.contextmanager
def track(config: Config, folder: Path, process: Process, log: Log) -> Iterator[Trackers]:
    """Yield the trackers in TRACK. At the end of the `with` block, report to them how the run ended."""
    names = dict.fromkeys(config.TRACK) if process.is_first else ()
    trackers = Trackers(TrackerThread(name, config, folder, log) for name in names)
    has_failed = True
    try:
        yield trackers
        has_failed = False
    finally:
        trackers.end(ending_of(folder, has_failed) if names else Ending("done", {}, ()))


def shown_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run, without secrets."""
    settings = flatten(config).items()
    return {key: without_secrets(value) if isinstance(value, str) else value for key, value in settings}


def without_secrets(text: str) -> str:
    """Return the text without credentials in URLs, and without the values of secret environment variables."""
    for name, value in os.environ.items():
        if IS_SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    return redacted(text)


def ending_of(folder: Path, has_failed: bool) -> Ending:
    """Return how a run ended, from its folder and the status.json in it."""
    status = read_object(folder / "status.json")
    state = status.get("state")
    if has_failed or state in ("failed", "save_failed") or status.get("exit_code") == ExitCode.NON_FINITE:
        state = "failed"
    best = {key: value for key, value in (status.get("best") or {}).items() if isinstance(value, int | float)}
    pictures = [folder / name for name in PICTURES if (folder / name).is_file()]
    return Ending(state if state in ("failed", "stopped") else "done", best, pictures)


def figures_of(axis: str, row: Mapping[str, float | None]) -> dict[str, float]:
    """Return {name on a tracker: value} for a row, without missing values.

    In the row of an epoch, train_loss becomes train/loss, eval_top1_ema becomes eval/top1_ema, and lr becomes run/lr.
    """
    figures = {}
    for name, value in row.items():
        group, _, rest = name.partition("_")
        if axis == "step":
            place = f"time/{name.removesuffix('_pct')}" if name.endswith("_pct") else f"step/{name}"
            is_shown = name in STEP_GROUP or name.endswith("_pct")
        else:
            place, is_shown = f"{group}/{rest}" if group in ("train", "eval") else f"run/{name}", name != "epoch"
        if is_shown and value is not None:
            figures[place] = value
    return figures
