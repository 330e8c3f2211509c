"""The base class of the trackers, and what they get from a run."""

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
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


class Row(NamedTuple):
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

    def add(self, rows: Sequence[Row]) -> None:
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


# --- TensorBoard ---


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

    def add(self, rows: Sequence[Row]) -> None:
        writer = self._open_writer()
        for row in rows:
            for name, value in row.figures.items():
                writer.add_scalar(name, value, row.number)
        writer.flush()

    def _open_writer(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._first_step)
        return self._writer

    def end(self, ending: Ending) -> None:
        if self._writer is None:
            return
        writer = self._open_writer()
        import numpy
        from PIL import Image

        for path in ending.pictures:
            with Image.open(path, formats=("PNG",)) as picture:
                writer.add_image(path.stem, numpy.asarray(picture.convert("RGB")), dataformats="HWC")
        writer.close()


# --- Weights & Biases ---


class Wandb(Tracker):
    """Sends a run to Weights & Biases. W&B's environment variables and files set project, entity, mode and key."""

    # {horizontal axis: figures}. W&B's default axis counts calls of log, and would continue to count after a resume.
    AXES = {"epoch": ("train/*", "eval/*", "run/*"), "step": ("step/*", "time/*")}

    def open(self) -> str:
        import wandb

        self._wandb, self.identity = wandb, self.identity or secrets.token_hex(4)
        self._file.parent.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.identity,
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
        if not self._run.offline:
            return self._run.url
        # If kill -9 ended the previous start, W&B's file may be lost, so this start sends all rows again.
        self.last = dict.fromkeys(self.last, -1)
        return f"offline; `wandb sync {Path(self._run.dir).parent}` uploads the run"

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"epoch" if row.axis == "epoch" else "step": row.number, **row.figures})

    def end(self, ending: Ending) -> None:
        for path in ending.pictures:
            self._run.log({path.stem: self._wandb.Image(str(path))})
        self._run.summary.update({f"best/{name}": value for name, value in ending.best.items()})
        self._run.finish(exit_code=int(ending.state == "failed"))


# --- MLflow ---


class Mlflow(Tracker):
    """Sends a run to MLflow. MLflow's environment variables name the server and the experiment.

    By default, MLflow writes to a folder next to the runs.
    """

    STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}

    def open(self) -> str:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow 3 refuses a folder
        # Telemetry would contact a server that the user did not name.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        from mlflow import entities

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # urllib3 would log a warning for each retry
        self._entities = entities
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (self.folder.absolute().parent / "mlruns").as_uri()
        self._client = mlflow.MlflowClient(uri)
        if self.identity:
            self._client.update_run(self.identity, status="RUNNING")
        else:
            self.identity = self._create()
        self._client.log_artifact(self.identity, str(self.folder / "config.yaml"))
        return f"run {self.identity} in {uri}"

    def _create(self) -> str:
        """Create the run on the server with its settings, which cannot change later. Return its ID."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"folder": str(self.folder.absolute())}
        identity = self._client.create_run(number, run_name=self.folder.name, tags=tags).info.run_id
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.settings.items()}
        self._client.log_batch(identity, params=[self._entities.Param(*item) for item in texts.items()])
        return identity

    def add(self, rows: Sequence[Row]) -> None:
        self._log((name, value, row.number) for row in rows for name, value in row.figures.items())

    def _log(self, points: Iterable[tuple[str, float, int]]) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, float(value), now, number) for name, value, number in points]
        self._client.log_batch(self.identity, metrics=metrics)

    def end(self, ending: Ending) -> None:
        for path in ending.pictures:
            self._client.log_artifact(self.identity, str(path))
        self._log((f"best/{name}", value, ending.best["epoch"]) for name, value in ending.best.items())
        self._client.set_terminated(self.identity, self.STATES[ending.state])
