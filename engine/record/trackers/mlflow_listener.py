"""Shows a run on MLflow."""

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.record.trackers.listeners import PROJECT, Ending, Listener, TrackedRow

STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}  # {Ending.state: MLflow's status}


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
