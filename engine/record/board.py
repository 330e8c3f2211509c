"""What every board can show, and what figures are called on it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.files import write_text

Row = Mapping[str, float | None]

STEP_GROUP = ("lr", "loss", "grad_norm", "loss_scale", "skipped")  # of steps.csv, beside the shares of time
PICTURES = ("confusion.png", "mistakes.png", "train_batch.png")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    folder: Path
    tracker: str
    settings: Mapping[str, Any]
    group: str = ""  # of several runs that belong together

    @property
    def state(self) -> Path:
        """Where the tracker's name of this run is kept from one start to the next."""
        return self.folder / "tracking" / f"{self.tracker}.json"

    @property
    def log(self) -> Path:
        """Where the tracker's library writes what it prints."""
        return self.state.with_suffix(".log")

    @property
    def id(self) -> str | None:
        try:
            return json.loads(self.state.read_text())["id"]
        except (OSError, ValueError, KeyError):
            return None

    def keep_id(self, number: str) -> None:
        write_text(self.state, json.dumps({"id": number}) + "\n")


class Board:
    """Base class. Rows come in order, those of updates as in steps.csv and those of epochs as in metrics.csv."""

    place = ""  # where the run can be seen
    epoch = step = -1  # of the last rows that it has already, of an earlier start of the run

    def show_settings(self, settings: Mapping[str, Any]) -> None:
        """All settings of the run, by full name."""

    def add_steps(self, rows: Iterable[Row]) -> None:
        """Figures of single updates."""

    def add_epochs(self, rows: Iterable[Row]) -> None:
        """Figures of whole epochs."""

    def settle(self) -> None:
        """All rows of earlier starts were added."""

    def add_picture(self, path: Path) -> None:
        """A picture of the run, at its end."""

    def show_best(self, best: Mapping[str, Any]) -> None:
        """The figures of the best epoch, at the end."""

    def end(self, state: str) -> None:
        """The run is done, failed, stopped or killed."""


def step_figures(row: Row) -> dict[str, float]:
    """{name on a board: value} of a row of steps.csv, without what is not known."""
    figures = {f"step/{name}": row[name] for name in STEP_GROUP}
    figures |= {f"time/{name.removesuffix('_pct')}": value for name, value in row.items() if name.endswith("_pct")}
    return {name: value for name, value in figures.items() if value is not None}


def epoch_figures(row: Row) -> dict[str, float]:
    """{name on a board: value} of a row of metrics.csv, without what was not measured."""
    return {name_of(column): value for column, value in row.items() if column != "epoch" and value is not None}


def name_of(column: str) -> str:
    """train_loss is train/loss, eval_top1_ema is eval/top1_ema, lr is run/lr."""
    group = next((each for each in ("train", "eval") if column.startswith(f"{each}_")), "run")
    return f"{group}/{column.removeprefix(f'{group}_')}"


def pictures_in(folder: Path) -> list[Path]:
    return [folder / name for name in PICTURES if (folder / name).is_file()]
