"""Sends runs to TensorBoard, Weights & Biases and MLflow. Each tracker has its own thread and cannot delay training."""

import contextlib
import importlib.util
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import Config
from engine.record.saved_files import PICTURES, read_object
from engine.record.trackers.tracker import Ending, TrackedRow, Tracker, without_secrets
from utils.commands import pip
from utils.distributed import Process
from utils.errors import ConfigError, ExitCode
from utils.log import Log

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # package names for pip; not in requirements.txt
PATIENCE = 10.0  # seconds without progress after which an ending run stops waiting for a tracker
LONGEST_END = 60.0  # maximum seconds that an ending run waits for a tracker that is still opening or sending
ROWS_AT_ONCE = 50  # maximum number of rows that a tracker gets in one call
# Columns of steps.csv that are sent to trackers. The columns *_pct are sent as well.
STEP_GROUP = ("lr", "loss", "grad_norm", "loss_scale", "skipped")


class TensorBoard(Tracker):
    """Writes TensorBoard's files. A resumed run discards earlier figures for its first step and later steps."""

    _writer = None
    _first_step = 0

    def open(self) -> str:
        return ""  # TensorBoard is imported at the first row, because the import takes a second of CPU time

    def go_back(self, step: int, epoch: int) -> None:
        if self._writer:
            self._writer.close()
        self._writer, self._first_step = None, step
        self.last = {"step": step - 1, "epoch": epoch - 1}

    def add(self, rows: Sequence[TrackedRow]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._first_step)
        for row in rows:
            for name, value in row.figures.items():
                self._writer.add_scalar(name, value, row.number)
        self._writer.flush()

    def end(self, ending: Ending) -> None:
        if self._writer is None:
            return
        import numpy
        from PIL import Image

        for path in ending.pictures:
            with Image.open(path, formats=("PNG",)) as picture:
                self._writer.add_image(path.stem, numpy.asarray(picture.convert("RGB")), dataformats="HWC")
        self._writer.close()


# --- all trackers of a run ---


def make_tracker(name: str, config: Config, folder: Path) -> Tracker:
    """Return the tracker of this name."""
    if name == "tensorboard":
        return TensorBoard(name, config, folder)
    from engine.record.trackers.servers import Mlflow, Wandb

    return {"wandb": Wandb, "mlflow": Mlflow}[name](name, config, folder)


def check_trackers(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
    for name in PACKAGES.keys() & config.TRACK:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a spec without an origin is just a folder of that name
            raise ConfigError(f"TRACK: {name} needs the package {PACKAGES[name]}: {pip('install')} {PACKAGES[name]}")


class TrackerThread:
    """Feeds one tracker from a queue. The first failure is logged as a warning and ends the tracker, not the run."""

    def __init__(self, tracker: Tracker, log: Log):
        self._tracker, self._log = tracker, log
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._is_open, self._moved = False, time.monotonic()
        self._thread = threading.Thread(target=self._run, name=tracker.name, daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue an item: a TrackedRow, the (step, epoch) of a start or a rollback, or an Ending as the last item."""
        if self._thread.is_alive():
            self._queue.put(item)

    def _run(self) -> None:
        tracker = self._tracker
        try:
            if place := tracker.open():
                self._log.say(f"{tracker.name}: {without_secrets(place)}")
            tracker.remember()
            self._is_open = True
            while self._handle():
                self._moved = time.monotonic()
        except BaseException as error:  # libraries raise SystemExit, too
            reason = without_secrets(f"{type(error).__name__}: {error}".split("\n")[0])[:300]
            self._log.warn(f"{tracker.name}: {reason}; training continues without it")

    def _handle(self) -> bool:
        """Send the rows in the queue, or handle another item. Return False after the last item."""
        tracker, rows, item = self._tracker, [], self._queue.get()
        while isinstance(item, TrackedRow):
            if item.number > tracker.last.get(item.axis, -1):
                rows.append(item)
            item = None if self._queue.empty() or len(rows) == ROWS_AT_ONCE else self._queue.get()
        if rows:
            tracker.add(rows)
            tracker.last |= {row.axis: row.number for row in rows if row.axis in tracker.last}
            tracker.remember()
        if isinstance(item, Ending):
            tracker.end(item)
        elif item:
            tracker.go_back(*item)
        return not isinstance(item, Ending)

    def join(self, deadline: float) -> None:
        """Wait until everything is sent, but give up if the tracker hangs."""
        asked = time.monotonic()
        while self._thread.is_alive():
            # A tracker that is opening may be migrating a database, which must not be interrupted.
            patience = PATIENCE if self._is_open else LONGEST_END
            if time.monotonic() > min(deadline, max(asked, self._moved) + patience):
                self._log.warn(f"{self._tracker.name}: not everything was sent when the run ended")
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
        for each in self._threads:
            each.put((step, epoch))
        for axis, rows in (("step", steps), ("epoch", epochs)):
            for row in rows:
                self.add(axis, row)

    def add(self, axis: str, row: Mapping[str, float | None]) -> None:
        """Send a row of steps.csv ("step") or metrics.csv ("epoch")."""
        if self._threads:
            found = TrackedRow(axis, int(row["epoch" if axis == "epoch" else "step"]), figures_of(axis, row))
            for each in self._threads:
                each.put(found)

    def end(self, ending: Ending) -> None:
        for each in self._threads:
            each.put(ending)
        deadline = time.monotonic() + LONGEST_END
        for each in self._threads:
            each.join(deadline)


@contextlib.contextmanager
def track(config: Config, folder: Path, process: Process, log: Log) -> Iterator[Trackers]:
    """Yield the trackers in TRACK. At the end of the `with` block, report to them how the run ended."""
    names = dict.fromkeys(config.TRACK) if process.is_first else ()
    trackers = Trackers(TrackerThread(make_tracker(name, config, folder), log) for name in names)
    has_failed = True
    try:
        yield trackers
        has_failed = False
    finally:
        trackers.end(ending_of(folder, has_failed) if names else Ending("done", {}, ()))


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
