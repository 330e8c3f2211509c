"""Sends a run to Weights & Biases."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from extras.trackers.tracker import PROJECT, Ending, Row, Tracker


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
