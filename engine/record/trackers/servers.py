"""Sends a run to Weights & Biases or to MLflow."""

import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.record.trackers.tracker import PROJECT, Ending, TrackedRow, Tracker


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

    def add(self, rows: Sequence[TrackedRow]) -> None:
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

    def add(self, rows: Sequence[TrackedRow]) -> None:
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
