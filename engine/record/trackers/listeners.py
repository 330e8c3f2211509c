"""Shows finished rows of metrics on TensorBoard, Weights & Biases and MLflow: a listener for each kind of tracker."""

import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = "halfstep"  # of all runs on a server, unless the server's own settings name another
# {horizontal axis: figures}. W&B's default axis counts calls of log, and would continue to count after a resume.
AXES = {"epoch": ("train/*", "eval/*", "run/*"), "step": ("step/*", "time/*")}
STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}  # of an Ending, for MLflow


class TrackedRow(NamedTuple):
    """Metrics of one update ("step") or one epoch, with their names on a tracker."""

    axis: str
    number: int  # number of the update or epoch
    figures: Mapping[str, float]


class Start(NamedTuple):
    """The run starts at this update and epoch, or went back to them."""

    step: int
    epoch: int


class Ending(NamedTuple):
    """How a run ended. `state`: done, failed, or stopped (it can be resumed)."""

    state: str
    best: Mapping[str, Any]  # the figures of the best epoch; empty if there is none
    pictures: Sequence[Path]


class Listener:
    """Connects to a tracker when it is made, and then sends it rows, in a thread of its own.

    Any error ends the listener, not the run. Its arguments are the run's folder, its settings without secrets, and its
    `identity`, if an earlier start sent something.
    """

    # The ID of the run on the tracker. None: the tracker has only files in the run's folder.
    identity: str | None = None
    place: str = ""  # where to see the run, for the log
    may_have_lost_rows: bool = False  # rows that an earlier start sent

    def go_back(self, step: int) -> bool:
        """Delete the figures of this update and later ones. Return False if the tracker cannot delete figures."""
        return False

    def add(self, rows: Sequence[TrackedRow]) -> None:
        raise NotImplementedError

    def end(self, ending: Ending) -> None:
        raise NotImplementedError


class TensorBoard(Listener):
    """Writes TensorBoard's files. A resumed run discards earlier figures for its first step and later steps."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], identity: str | None):
        self._folder, self._first_step = folder / "tensorboard", 0
        self._writer: Any = None  # made for the first row, because the import takes a second of CPU time

    def go_back(self, step: int) -> bool:
        if self._writer:
            self._writer.close()
        self._writer, self._first_step = None, step
        return True

    def add(self, rows: Sequence[TrackedRow]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
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


class Wandb(Listener):
    """Sends a run to Weights & Biases. W&B's environment variables and files set project, entity, mode and key."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], identity: str | None):
        import wandb

        self._wandb, self.identity = wandb, identity or secrets.token_hex(4)
        files = folder / "tracking"
        files.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.identity,
            resume="allow",
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=str(files),
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True, init_timeout=30.0),
            allow_val_change=True,
        )
        for axis, names in AXES.items():
            self._run.define_metric(axis, hidden=True)
            for name in names:
                self._run.define_metric(name, step_metric=axis)
        self.may_have_lost_rows = self._run.offline  # kill -9 of an earlier start may have lost W&B's file
        self.place = self._run.url
        if self._run.offline:
            self.place = f"offline; `wandb sync {Path(self._run.dir).parent}` uploads the run"

    def add(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            self._run.log({row.axis: row.number, **row.figures})

    def end(self, ending: Ending) -> None:
        for path in ending.pictures:
            self._run.log({path.stem: self._wandb.Image(str(path))})
        self._run.summary.update({f"best/{name}": value for name, value in ending.best.items()})
        self._run.finish(exit_code=int(ending.state == "failed"))


class Mlflow(Listener):
    """Sends a run to MLflow. MLflow's environment variables name the server and the experiment.

    By default, MLflow writes to a folder next to the runs.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], identity: str | None):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow 3 refuses a folder
        # Telemetry would contact a server that the user did not name.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # urllib3 would log a warning for each retry
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder.absolute().parent / "mlruns").as_uri()
        self._client, self._to_metric = MlflowClient(uri), Metric
        if identity:
            self._client.update_run(identity, status="RUNNING")
        else:
            name, tags = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), {"folder": str(folder.absolute())}
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            identity = self._client.create_run(number, run_name=folder.name, tags=tags).info.run_id
            texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
            self._client.log_batch(identity, params=[Param(key, text) for key, text in texts.items()])
        self._client.log_artifact(identity, str(folder / "config.yaml"))
        self.identity, self.place = identity, f"run {identity} in {uri}"

    def add(self, rows: Sequence[TrackedRow]) -> None:
        self._log((name, value, row.number) for row in rows for name, value in row.figures.items())

    def _log(self, points: Iterable[tuple[str, float, int]]) -> None:
        now = int(1000 * time.time())
        metrics = [self._to_metric(name, float(value), now, number) for name, value, number in points]
        self._client.log_batch(self.identity, metrics=metrics)

    def end(self, ending: Ending) -> None:
        for path in ending.pictures:
            self._client.log_artifact(self.identity, str(path))
        self._log((f"best/{name}", value, ending.best["epoch"]) for name, value in ending.best.items())
        self._client.set_terminated(self.identity, STATES[ending.state])


# {value of TRACK: listener}
LISTENERS: dict[str, type[Listener]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
