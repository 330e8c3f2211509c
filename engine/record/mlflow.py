"""MLflow. Its server and experiment are its own environment variables; without any, a folder beside the runs."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses a folder otherwise
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # to another server than the one that the user named

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from engine.record.board import Board, Row, TrackedRun, epoch_figures, step_figures

EXPERIMENT = "halfstep"
METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100  # what a server takes
LONGEST_PARAM = 500  # characters; of older servers
# The last figure of each row, the number of its epoch or update: where it is there, the row is whole.
MARKS = {"epoch": "epoch", "step": "update"}
STATUSES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}


class Mlflow(Board):
    """A run on MLflow. Its store says what it has already."""

    def __init__(self, run: TrackedRun):
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder.absolute().parent / "mlruns").as_uri()
        self._client, self._folder = MlflowClient(uri), run.folder
        self._id, self._known = run.id, {}
        # The rows that a kill can have cut: the first ones that are missing.
        self._may_be_cut = set(MARKS) if self._id else set()
        if self._id is None:
            self._id = self._create(run)
            run.keep_id(self._id)
        else:
            self._client.update_run(self._id, status="RUNNING")
            found = self._client.get_run(self._id).data
            self._known = dict(found.params)
            self.epoch, self.step = (int(found.metrics.get(MARKS[axis], -1)) for axis in ("epoch", "step"))
        self.place = f"run {self._id} in {uri}"

    def _create(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"folder": str(run.folder.absolute())} | ({"group": run.group} if run.group else {})
        return self._client.create_run(number, run_name=run.folder.name, tags=tags).info.run_id

    def show_settings(self, settings: Mapping[str, Any]) -> None:
        """A parameter of a run cannot change: what a resumed run changed is a tag."""
        texts = {key: as_text(value)[:LONGEST_PARAM] for key, value in settings.items()}
        params = [Param(key, text) for key, text in texts.items() if key not in self._known]
        tags = [RunTag(key, text) for key, text in texts.items() if self._known.get(key, text) != text]
        for some in in_pieces(params, PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=some)
        for some in in_pieces(tags, PARAMS_AT_ONCE):
            self._client.log_batch(self._id, tags=some)
        self._client.log_artifact(self._id, str(self._folder / "config.yaml"))

    def add_steps(self, rows: Iterable[Row]) -> None:
        self._add("step", rows, step_figures)

    def add_epochs(self, rows: Iterable[Row]) -> None:
        self._add("epoch", rows, epoch_figures)

    def _add(self, axis: str, rows: Iterable[Row], figures_of: Callable[[Row], dict[str, float]]) -> None:
        now, metrics = int(1000 * time.time()), []
        for row in rows:
            figures = figures_of(row) | {MARKS[axis]: row[axis]}
            if axis in self._may_be_cut:
                figures = {name: value for name, value in figures.items() if not self._has(name, int(row[axis]))}
                self._may_be_cut.remove(axis)
            metrics += [Metric(name, float(value), now, int(row[axis])) for name, value in figures.items()]
        for some in in_pieces(metrics, METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=some)

    def _has(self, name: str, step: int) -> bool:
        return any(each.step == step for each in self._client.get_metric_history(self._id, name))

    def add_picture(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def show_best(self, best: Mapping[str, Any]) -> None:
        known, now = self._client.get_run(self._id).data.metrics, int(1000 * time.time())
        figures = {f"best/{name}": value for name, value in best.items() if isinstance(value, int | float)}
        new = {name: value for name, value in figures.items() if known.get(name) != value}
        self._client.log_batch(self._id, [Metric(name, value, now, best["epoch"]) for name, value in new.items()])

    def end(self, state: str) -> None:
        self._client.set_terminated(self._id, STATUSES[state])


def as_text(value: Any) -> str:
    """A parameter must not be empty."""
    return value if isinstance(value, str) and value else json.dumps(value)


def in_pieces(things: list, size: int) -> Iterator[list]:
    remaining = iter(things)
    while some := list(islice(remaining, size)):
        yield some
