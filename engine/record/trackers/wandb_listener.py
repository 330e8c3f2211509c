"""Shows a run on Weights & Biases."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.record.trackers.listeners import PROJECT, Ending, Listener, TrackedRow

# {horizontal axis: figures}. W&B's default axis counts calls of log, and would continue to count after a resume.
AXES = {"epoch": ("train/*", "eval/*", "run/*"), "step": ("step/*", "time/*")}


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
