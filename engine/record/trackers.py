"""TensorBoard, Weights & Biases, MLflow: a queue and a thread for each, so that none of them delays or ends a run."""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import queue
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import DATA, MODEL, RECIPE, Config
from configs.values import flatten, of_role, to_text
from utils.distributed import Process
from utils.errors import ConfigError
from utils.files import write_text
from utils.log import Log
from utils.text import redacted

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # what pip installs
PROJECT = "halfstep"
PATIENCE = 10.0  # seconds without progress after which the end of a run drops a tracker
LONGEST_END = 60.0  # seconds that the end of a run waits for one that still sends
ROWS_AT_ONCE = 50
STEP_GROUP = ("lr", "loss", "grad_norm", "loss_scale", "skipped")  # of steps.csv, beside the shares of time
PICTURES = ("confusion.png", "mistakes.png", "train_batch.png")
IS_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.I)  # names of environment variables
SHORTEST_SECRET = 6  # characters; a shorter value may be part of any word


class Row(NamedTuple):
    """Figures of one update ("step"), one epoch or one comparison with float32 ("shadow"), by their names on a tracker."""

    axis: str
    number: int  # of the update or epoch
    figures: dict[str, float]


class Ending(NamedTuple):
    """How a run ended: done, failed, stopped (to be resumed)."""

    state: str
    best: Mapping[str, Any]  # the figures of the best epoch; empty without one
    pictures: Sequence[Path]


class Tracker:
    """Base class. A thread of its own opens it and calls its methods; what they raise is the end of this tracker."""

    seconds_to_open = PATIENCE

    def __init__(self, name: str, config: Config, folder: Path):
        self.name, self.folder = name, folder
        self.settings = {
            key: without_secrets(value) if isinstance(value, str) else value for key, value in flatten(config).items()
        }
        self._file = folder / "tracking" / f"{name}.json"  # has the run's identity on the tracker
        self.last = {"step": -1, "epoch": -1}  # numbers of the last rows that it has; others before are not sent again

    def open(self) -> str:
        """Import the library and connect. Returns where the run can be seen."""
        raise NotImplementedError

    def add(self, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    def go_back(self, step: int, epoch: int) -> None:
        """A rollback repeats from this update on. Most trackers cannot take a figure back."""

    def end(self, ending: Ending) -> None:
        raise NotImplementedError

    @property
    def identity(self) -> str | None:
        """The run's identity on the tracker, from an earlier start."""
        try:
            return json.loads(self._file.read_text())["id"]
        except (OSError, ValueError, KeyError):
            return None

    def keep_identity(self, identity: str) -> None:
        self._file.parent.mkdir(exist_ok=True)
        write_text(self._file, json.dumps({"id": identity}) + "\n")


class TensorBoard(Tracker):
    """Files in the run's folder. Figures of earlier starts from the first update of this one on are dropped."""

    seconds_to_open = LONGEST_END  # its import takes long on a busy machine, and waits for nobody

    def __init__(self, name: str, config: Config, folder: Path):
        super().__init__(name, config, folder)
        defaults = flatten(Config())
        changed = {key: self.settings[key] for key in of_role(DATA, MODEL, RECIPE)}
        self._changed = {
            key: value if isinstance(value, bool | int | float | str) else to_text_of_any(value)
            for key, value in changed.items()
            if value != defaults[key]
        }
        self._writer = None

    def open(self) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._open_writer = SummaryWriter
        return ""

    def go_back(self, step: int, epoch: int) -> None:
        if self._writer:
            self._writer.close()
        self.last = {"step": step - 1, "epoch": epoch - 1}
        self._writer = self._open_writer(str(self.folder / "tensorboard"), purge_step=step)

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.figures.items():
                self._writer.add_scalar(name, value, row.number)

    def end(self, ending: Ending) -> None:
        """Add the pictures, and a row of the tab HPARAMS, which compares runs by the settings that are not the defaults."""
        import numpy
        from PIL import Image

        for path in ending.pictures:
            with Image.open(path) as picture:
                self._writer.add_image(path.stem, numpy.asarray(picture.convert("RGB")), dataformats="HWC")
        if ending.best:
            figures = {f"best/{name}": value for name, value in ending.best.items()}
            self._writer.add_hparams(self._changed, figures, run_name=".", global_step=ending.best["epoch"])
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases; project, entity, mode and key are its own environment variables and files.

    Its server says what it has already. Offline nothing does, so a resumed run writes a new file with all rows, and drops
    the former one at its end.
    """

    # Which figure is the horizontal axis of which; W&B's own count of calls would go on after a resume.
    AXES = {"epoch": ("train/*", "eval/*", "run/*"), "step": ("step/*", "time/*", "shadow/*")}

    def open(self) -> str:
        import wandb

        self._wandb, identity = wandb, self.identity or secrets.token_hex(4)
        self.keep_identity(identity)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=identity,
            resume="allow",
            name=os.environ.get("WANDB_NAME", self.folder.name),
            dir=str(self._file.parent),
            config=self.settings,
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True, init_timeout=30.0),
            allow_val_change=True,
        )
        for axis, names in self.AXES.items():
            self._run.define_metric(axis, hidden=True)
            for name in names:
                self._run.define_metric(name, step_metric=axis)
        self._own = Path(self._run.dir).parent
        if self._run.offline:
            return f"offline; `wandb sync {self._own}` uploads the run"
        self.last = {axis: int(self._run.summary.get(axis, -1)) for axis in self.AXES}
        return self._run.url

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"epoch" if row.axis == "epoch" else "step": row.number, **row.figures})

    def end(self, ending: Ending) -> None:
        for path in ending.pictures:
            self._run.log({path.stem: self._wandb.Image(str(path))})
        self._run.summary.update({f"best/{name}": value for name, value in ending.best.items()})
        self._run.finish(exit_code=int(ending.state == "failed"))
        if self._run.offline:
            for former in self._own.parent.glob(f"offline-run-*-{self._run.id}"):
                if former != self._own:
                    shutil.rmtree(former, ignore_errors=True)


class Mlflow(Tracker):
    """MLflow; server and experiment are its own environment variables, without them a folder beside the runs."""

    seconds_to_open = LONGEST_END  # it may be migrating a database, which must not be cut
    # The last figure of each row, the number of its epoch or update: where it is there, the row is whole.
    MARKS = {"epoch": "epoch", "step": "update"}
    STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
    METRICS_AT_ONCE, PARAMS_AT_ONCE, LONGEST_PARAM = 1000, 100, 500  # what a server takes; characters

    def open(self) -> str:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses a folder otherwise
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # to another server than the one that the user named
        import mlflow
        from mlflow import entities

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # each of its retries would be a warning
        self._entities = entities
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (self.folder.absolute().parent / "mlruns").as_uri()
        self._client, self._id, known = mlflow.MlflowClient(uri), self.identity, {}
        if self._id is None:
            self._id = self._create()
            self.keep_identity(self._id)
        else:
            self._client.update_run(self._id, status="RUNNING")
            found = self._client.get_run(self._id).data
            known = found.params
            self.last = {axis: int(found.metrics.get(mark, -1)) for axis, mark in self.MARKS.items()}
        self._show_settings(known)
        return f"run {self._id} in {uri}"

    def _create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"folder": str(self.folder.absolute())}
        return self._client.create_run(number, run_name=self.folder.name, tags=tags).info.run_id

    def _show_settings(self, known: Mapping[str, str]) -> None:
        """Log the settings as parameters. One of an earlier start cannot change: its new value is a tag."""
        texts = {
            key: value if isinstance(value, str) and value else json.dumps(value)
            for key, value in self.settings.items()
        }
        texts = {key: text[: self.LONGEST_PARAM] for key, text in texts.items()}
        params = [self._entities.Param(key, text) for key, text in texts.items() if key not in known]
        tags = [self._entities.RunTag(key, text) for key, text in texts.items() if known.get(key, text) != text]
        for start in range(0, max(len(params), len(tags)), self.PARAMS_AT_ONCE):
            part = slice(start, start + self.PARAMS_AT_ONCE)
            self._client.log_batch(self._id, params=params[part], tags=tags[part])
        self._client.log_artifact(self._id, str(self.folder / "config.yaml"))

    def add(self, rows: Sequence[Row]) -> None:
        marked = [
            (row.number, row.figures | ({self.MARKS[row.axis]: row.number} if row.axis in self.MARKS else {}))
            for row in rows
        ]
        self._log([(name, value, number) for number, figures in marked for name, value in figures.items()])

    def _log(self, points: Sequence[tuple[str, float, int]]) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, float(value), now, number) for name, value, number in points]
        for start in range(0, len(metrics), self.METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + self.METRICS_AT_ONCE])

    def end(self, ending: Ending) -> None:
        for path in ending.pictures:
            self._client.log_artifact(self._id, str(path))
        best = {f"best/{name}": value for name, value in ending.best.items() if isinstance(value, int | float)}
        self._log([(name, value, ending.best["epoch"]) for name, value in best.items()])
        self._client.set_terminated(self._id, self.STATES[ending.state])


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


def check_trackers(config: Config) -> None:
    """Refuse a tracker whose package is missing."""
    for name in config.TRACK:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin it is a folder of that name
            raise ConfigError(f"TRACK: {name} needs the package {PACKAGES[name]}: pip install {PACKAGES[name]}")


def describe_trackers(config: Config) -> list[str]:
    """The row of -check: the trackers of the run, with the versions of their packages."""
    check_trackers(config)
    distributions = importlib.metadata.packages_distributions()
    return [f"{name} {importlib.metadata.version(distributions[name][0])}" for name in dict.fromkeys(config.TRACK)]


class TrackerThread:
    """Feeds one tracker from a queue. Its first failure is a warning and its end; the run goes on."""

    def __init__(self, tracker: Tracker, log: Log):
        self._tracker, self._log = tracker, log
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._is_open, self._moved = False, time.monotonic()
        self._thread = threading.Thread(target=self._run, name=tracker.name, daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """`item`: a Row; (step, epoch) of a begin or a rollback; an Ending, the last one."""
        if self._thread.is_alive():
            self._queue.put(item)

    def _run(self) -> None:
        tracker = self._tracker
        try:
            if place := tracker.open():
                self._log.say(f"{tracker.name}: {without_secrets(place)}")
            self._is_open = True
            while self._handle(self._next()):
                self._moved = time.monotonic()
        except BaseException as error:  # libraries raise SystemExit, too
            reason = without_secrets(f"{type(error).__name__}: {error}".split("\n")[0])[:300]
            self._log.warn(f"{tracker.name}: {reason}; training continues without it")

    def _next(self) -> list[Any]:
        """What came next: several rows at once where they have gathered, or one thing else."""
        items = [self._queue.get()]
        while len(items) < ROWS_AT_ONCE and isinstance(items[-1], Row) and not self._queue.empty():
            items.append(self._queue.get())
        return items

    def _handle(self, items: list[Any]) -> bool:
        """Returns whether more is to come."""
        tracker = self._tracker
        rows = [each for each in items if isinstance(each, Row)]
        if rows := [each for each in rows if each.number > tracker.last.get(each.axis, -1)]:
            tracker.last |= {each.axis: each.number for each in rows if each.axis in tracker.last}
            tracker.add(rows)
        if isinstance(last := items[-1], Row):
            return True
        if isinstance(last, Ending):
            tracker.end(last)
            return False
        tracker.go_back(*last)
        return True

    def join(self, deadline: float) -> None:
        """Wait until everything is sent; drop what hangs."""
        asked = time.monotonic()
        while self._thread.is_alive():
            patience = PATIENCE if self._is_open else max(PATIENCE, self._tracker.seconds_to_open)
            if time.monotonic() > min(deadline, max(asked, self._moved) + patience):
                self._log.warn(f"{self._tracker.name}: not everything was sent when the run ended")
                return
            self._thread.join(0.05)


class Trackers:
    """All trackers of a run, none in processes other than the first."""

    def __init__(self, threads: Iterable[TrackerThread] = ()):
        self._threads = list(threads)

    def begin(
        self, step: int, epoch: int, steps: Sequence[Mapping[str, Any]], epochs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Training begins at this update of this epoch, or goes back to it. `steps`, `epochs`: all rows before."""
        for each in self._threads:
            each.put((step, epoch))
        for axis, rows in (("step", steps), ("epoch", epochs)):
            for row in rows:
                self.add(axis, row)

    def add(self, axis: str, row: Mapping[str, float | None]) -> None:
        """A row of steps.csv ("step"), metrics.csv ("epoch") or shadow.csv."""
        if self._threads:
            found = Row(axis, int(row["epoch" if axis == "epoch" else "step"]), figures_of(axis, row))
            for each in self._threads:
                each.put(found)

    def end(self, ending: Ending) -> None:
        for each in self._threads:
            each.put(ending)
        deadline = time.monotonic() + LONGEST_END
        for each in self._threads:
            each.join(deadline)


@contextlib.contextmanager
def tracking(config: Config, folder: Path, process: Process, log: Log) -> Iterator[Trackers]:
    """The trackers of TRACK and TENSORBOARD; at the end of the block they learn how the run ended."""
    names = [*["tensorboard"] * config.TENSORBOARD, *dict.fromkeys(config.TRACK)] if process.is_first else []
    trackers = Trackers(TrackerThread(TRACKERS[name](name, config, folder), log) for name in names)
    has_failed = True
    try:
        yield trackers
        has_failed = False
    finally:
        trackers.end(ending_of(folder, has_failed) if names else Ending("done", {}, ()))


def ending_of(folder: Path, has_failed: bool) -> Ending:
    """What status.json and the folder of the run say of its end."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        status = {}
    state = status.get("state")
    if has_failed or state in ("failed", "save_failed") or status.get("exit_code") == 3:
        state = "failed"
    best = {key: value for key, value in (status.get("best") or {}).items() if isinstance(value, int | float)}
    pictures = [folder / name for name in PICTURES if (folder / name).is_file()]
    return Ending(state if state in ("failed", "stopped") else "done", best, pictures)


def figures_of(axis: str, row: Mapping[str, float | None]) -> dict[str, float]:
    """{name on a tracker: value} of a row, without what was not measured.

    In an epoch's row train_loss is train/loss, eval_top1_ema is eval/top1_ema, lr is run/lr.
    """
    if axis == "step":
        figures = {f"step/{name}": row.get(name) for name in STEP_GROUP}
        figures |= {f"time/{name.removesuffix('_pct')}": value for name, value in row.items() if name.endswith("_pct")}
    elif axis == "shadow":
        figures = {f"shadow/{name}": value for name, value in row.items() if name != "step"}
    else:
        groups = {name: name.partition("_")[0] for name in row if name != "epoch"}
        groups = {name: group if group in ("train", "eval") else "run" for name, group in groups.items()}
        figures = {f"{group}/{name.removeprefix(f'{group}_')}": row[name] for name, group in groups.items()}
    return {name: value for name, value in figures.items() if value is not None}


def without_secrets(text: str) -> str:
    """The text without credentials in URLs, and without values of environment variables that hold some."""
    for name, value in os.environ.items():
        if IS_SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    return redacted(text)


def to_text_of_any(value: Any) -> str:
    """A setting as text; sections of arguments too."""
    return str(value) if isinstance(value, dict) else to_text(value)
