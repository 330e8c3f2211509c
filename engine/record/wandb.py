"""Weights & Biases. Project, entity, mode and key are its own environment variables and files."""

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import wandb

from engine.record.board import Board, Row, TrackedRun, epoch_figures, step_figures

PROJECT = "halfstep"
SECONDS_TO_CONNECT = 30.0
EXIT_CODES = {"done": 0, "failed": 1, "stopped": 0, "killed": 137}
# Which figure is the horizontal axis of which; W&B's own count of calls would go on after a resume.
AXES = {"epoch": ("train/*", "eval/*", "run/*"), "step": ("step/*", "time/*")}


class Wandb(Board):
    """A run on W&B.

    Its server says what it has already. Offline, nothing says for sure what of an earlier start arrived in its file, so
    a resumed run writes a new file with everything, and drops the former one.
    """

    def __init__(self, run: TrackedRun):
        number = run.id or secrets.token_hex(4)
        run.keep_id(number)
        self._folder = run.state.parent
        options = {"x_stats_pid": os.getppid()} if "x_stats_pid" in wandb.Settings.model_fields else {}
        settings = wandb.Settings(
            console="off", silent=True, save_code=False, disable_git=True, init_timeout=SECONDS_TO_CONNECT, **options
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=number,
            resume="allow",
            name=os.environ.get("WANDB_NAME", run.folder.name),
            group=os.environ.get("WANDB_RUN_GROUP", run.group or None),
            dir=str(self._folder),
            config=dict(run.settings),
            settings=settings,
            allow_val_change=True,
        )
        for axis, names in AXES.items():
            self._run.define_metric(axis, hidden=True)
            for name in names:
                self._run.define_metric(name, step_metric=axis)
        self._own = Path(self._run.dir).parent
        self.place = f"offline; `wandb sync {self._own}` uploads the run" if self._run.offline else self._run.url
        if not self._run.offline:
            self.epoch, self.step = (int(self._run.summary.get(axis, -1)) for axis in AXES)

    def add_steps(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._run.log({"step": int(row["step"]), **step_figures(row)})

    def add_epochs(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._run.log({"epoch": row["epoch"], **epoch_figures(row)})

    def settle(self) -> None:
        if self._run.offline:
            for former in (self._folder / "wandb").glob(f"offline-run-*-{self._run.id}"):
                if former.name != self._own.name:
                    shutil.rmtree(former, ignore_errors=True)

    def add_picture(self, path: Path) -> None:
        self._run.log({path.stem: wandb.Image(str(path))})

    def show_best(self, best: Mapping[str, Any]) -> None:
        self._run.summary.update({f"best/{name}": value for name, value in best.items()})

    def end(self, state: str) -> None:
        self._run.finish(exit_code=EXIT_CODES[state])
