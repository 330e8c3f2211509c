"""Metrics of a run: every column of metrics.csv and steps.csv with its meaning, and the callback that writes them.

docs/tracking.md has the table of these columns. `python scripts/maintenance/make_settings_page.py` writes it.
"""

import contextlib
import json
import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from engine.evaluation.scores import Scores
from engine.record.saved_run import read_rows, read_table
from engine.record.timing import Timing, shares
from engine.train.callback import PHASES, Callback
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.errors import cause_of, naming_damage
from utils.files import LineFile, write_text
from utils.log import Log
from utils.text import csv_text

Row = dict[str, float | None]


class Epoch(NamedTuple):
    """The source of an epoch's metrics. Only process 0 reads them, so no metric may call a collective."""

    trainer: Trainer
    result: EpochResult
    times: dict[str, float | None]  # percentage of the training time in each phase

    def score(self, name: str, digits: int = 4) -> float | None:
        """Return a score of the raw weights, or None in an epoch without evaluation."""
        scores = self.result.scores.get("")
        return finite(getattr(scores, name), digits) if scores else None

    def further_scores(self) -> Row:
        """Return the raw weights' scores other than loss, top-1 and top-5, and all scores of the EMA weights."""
        row: Row = {}
        for suffix, scores in self.result.scores.items():
            figures = scores.more() if not suffix else {"top1": scores.top1, "top5": scores.top5} | scores.more()
            row |= {f"eval_loss{suffix}": finite(scores.loss)} if suffix else {}
            row |= {f"eval_{name}{suffix}": round(value, 4) for name, value in figures.items()}
        return row

    @property
    def images_per_s(self) -> float:
        return self.result.num_images / max(self.result.training_seconds, 1e-9)


class Column(NamedTuple):
    """A column of metrics.csv."""

    name: str
    meaning: str
    value: Callable[[Epoch], float | Row | None]  # returns a row to fill several columns at once
    # A column with a title is also shown on the epoch's line on a terminal.
    title: str = ""
    text: Callable[[float], str] = "{:.4f}".format
    width: int = 8


OF_LAYERS = "; with `TRAIN.LAYER_DECAY` the classifier's, and earlier layers have a fraction of it"
# The first six columns are the columns of timm's summary.csv. Scores are in percent unless the meaning says otherwise.
COLUMNS = (
    Column(
        "epoch",
        "number of the epoch, from 0; -1: the weights that the run started from, before training",
        lambda epoch: epoch.trainer.epoch,
    ),
    Column(
        *("train_loss", "mean training loss", lambda epoch: finite(epoch.result.report.mean_loss)),
        **{"title": "loss", "width": 6},
    ),
    Column("eval_loss", "validation loss", lambda epoch: epoch.score("loss", 6), title="val loss"),
    Column("eval_top1", "validation top-1 accuracy", lambda epoch: epoch.score("top1")),
    Column("eval_top5", "validation top-5 accuracy", lambda epoch: epoch.score("top5")),
    Column("lr", f"learning rate of the last update{OF_LAYERS}", lambda epoch: epoch.result.report.lr),
    Column(
        "train_top1",
        "top-1 accuracy on augmented training images",
        lambda epoch: finite(100 * epoch.result.report.accuracy),
    ),
    Column(
        "eval_macro_recall, eval_macro_f1, eval_micro_f1, eval_map",
        "further scores, the last two with several labels per image; with EMA every score again, as in `eval_top1_ema`",
        Epoch.further_scores,
    ),
    Column("step", "number of updates until the end of the epoch", lambda epoch: epoch.trainer.step),
    Column(
        *("images_per_s", "training images per second", lambda epoch: round(epoch.images_per_s, 1)),
        **{"title": "images/s", "text": lambda speed: f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}"},
    ),
    Column("data_wait_pct", "share of the training time spent waiting for data", lambda epoch: epoch.times["data"]),
    Column(
        "memory_mb",
        "peak memory in MiB of the device, or on CPUs of process 0",
        lambda epoch: round(peak_memory(epoch.trainer.process.device) / 2**20),
    ),
    Column("loss_scale", "loss scale in half precision", lambda epoch: epoch.result.report.loss_scale),
    Column("skipped", "updates skipped in the epoch", lambda epoch: epoch.result.report.skipped),
    Column("grad_norm", "mean norm of the gradient", lambda epoch: round(epoch.result.report.mean_grad_norm, 6)),
    Column("train_seconds", "training time in seconds", lambda epoch: round(epoch.result.training_seconds, 3)),
    Column("eval_seconds", "evaluation time in seconds", lambda epoch: round(epoch.result.evaluation_seconds, 3)),
)
# The columns of steps.csv, one row per report. They are fields of `Report`.
STEP_COLUMNS = {
    "step": "number of the update, from 0",
    "epoch": "number of the epoch, from 0",
    "lr": f"learning rate{OF_LAYERS}",
    "loss": "training loss of the update",
    "mean_loss": "mean training loss of the epoch so far",
    "grad_norm": "norm of the gradient",
    "loss_scale": "loss scale in half precision",
    "skipped": "updates skipped in the epoch so far",
    "num_updates": "with `TRAIN.BUDGET`: the current plan for the number of updates of the whole run",
    "seconds": "time since the last report",
    **{f"{name}_pct": f"percentage of these seconds in phase {name}" for name in PHASES},
}


def epoch_row(epoch: Epoch) -> Row:
    """Return the row of metrics.csv for an epoch."""
    row: Row = {}
    for column in COLUMNS:
        value = column.value(epoch)
        row |= value if isinstance(value, dict) else {column.name: value}
    return row


def start_row(trainer: Trainer, scores: Scores, seconds: float) -> Row:
    """Return the row of metrics.csv before the first epoch, with empty columns for metrics that only training has."""
    nothing = Report(*[math.nan] * 11)
    row = epoch_row(Epoch(trainer, EpochResult(nothing, {"": scores}, 0, 0.0, seconds), {"data": None}))
    measured = {key: value for key, value in row.items() if value is not None and math.isfinite(value)}
    return dict.fromkeys(row) | measured | {"epoch": -1}


def finite(value: float, digits: int = 6) -> float | None:
    """Return the value rounded for a table, or None if it is not finite.

    A mean is NaN if every update was skipped, and JSON has no NaN.
    """
    return round(value, digits) if math.isfinite(value) else None


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the device if it counts memory, otherwise of this process."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class EpochRows:
    """Writes metrics.csv and metrics.jsonl with one row per epoch. Metrics that were not measured in an epoch are empty."""

    def __init__(self, folder: Path, first_epoch: int):
        """Keep the rows before `first_epoch` from an earlier start of this run."""
        self._folder = folder
        self.rows: list[Row] = [row for row in read_rows(folder / "metrics.jsonl") if row["epoch"] < first_epoch]
        self.is_written = True

    def add(self, row: Row) -> None:
        """Add a row and write all rows, including rows that an earlier full disk kept out."""
        self.rows.append(row)
        self.is_written = False
        self.write()

    def write(self) -> None:
        write_text(self._folder / "metrics.jsonl", "".join(json.dumps(each) + "\n" for each in self.rows))
        columns = list(dict.fromkeys(name for each in self.rows for name in each))
        table = csv_text([columns, *([row.get(name) for name in columns] for row in self.rows)])
        write_text(self._folder / "metrics.csv", table)
        self.is_written = True


class StepRows:
    """Writes steps.csv: metrics of single updates, one row every REPORT_FREQ updates."""

    def __init__(self, folder: Path, first_step: int, has_budget: bool = False):
        """Keep the rows before `first_step`, without a last line that a kill cut off."""
        path = folder / "steps.csv"
        self._columns = [name for name in STEP_COLUMNS if has_budget or name != "num_updates"]
        with naming_damage(path):
            self.rows: list[Row] = [
                {name: float(row[name]) if row.get(name) else None for name in STEP_COLUMNS}
                for row in read_table(path)
                if int(row["step"]) < first_step
            ]
        write_text(path, "\n".join([",".join(self._columns), *map(self._line, self.rows), ""]))
        self._file = LineFile(path)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._file.write(f"{self._line(row)}\n")

    def _line(self, row: Row) -> str:
        """Return a row as a line of the file, with unknown values empty."""
        return ",".join("" if row.get(name) is None else f"{row[name]:.10g}" for name in self._columns)

    def close(self) -> None:
        self._file.close()


class RowReader(Protocol):
    """A receiver of each row of steps.csv ("step") and metrics.csv ("epoch"), such as a tracker."""

    def begin(self, step: int, epoch: int, steps: Sequence[Mapping], epochs: Sequence[Mapping]) -> None: ...

    def add(self, axis: str, row: Mapping[str, float | None]) -> None: ...


class Curves(Protocol):
    """A drawer of curves of the rows so far, such as extras/report."""

    def draw(self, epochs: Sequence[Mapping], steps: Sequence[Mapping], now: bool) -> None: ...


class Recorder(Callback):
    """Writes the metrics of a run in process 0. A full disk does not end a run, because rows are kept for the next write."""

    def __init__(
        self,
        folder: Path,
        log: Log,
        timing: Timing,
        trainer: Trainer,
        trackers: RowReader | None = None,
        curves: Curves | None = None,
    ):
        self._folder, self._log, self._timing = folder, log, timing
        self._trackers, self._curves = trackers, curves
        self._open(trainer)

    def _open(self, trainer: Trainer) -> None:
        self._epochs = EpochRows(self._folder, trainer.epoch if trainer.step else -1)
        self._steps = StepRows(self._folder, trainer.step, trainer.config.TRAIN.BUDGET is not None)
        if self._trackers:
            self._trackers.begin(trainer.step, trainer.epoch, self._steps.rows, self._epochs.rows)

    def on_rollback(self, trainer: Trainer) -> None:
        self.close()
        self._open(trainer)

    def on_start_scored(self, trainer: Trainer, scores: Scores, seconds: float) -> None:
        with self._warn_on_os_error():
            self._epochs.add(start_row(trainer, scores, seconds))

    def on_report(self, trainer: Trainer, report: Report) -> None:
        times = {f"{name}_pct": report.shares.get(name) for name in PHASES}
        row = {name: times[name] if name in times else getattr(report, name) for name in STEP_COLUMNS}
        if self._trackers:
            self._trackers.add("step", row)
        with self._warn_on_os_error():
            self._steps.add(row)

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        times = shares(self._timing.epoch_seconds, trainer.process.device)
        row = epoch_row(Epoch(trainer, result, times))
        if self._trackers:
            self._trackers.add("epoch", row)
        with self._warn_on_os_error():
            self._epochs.add(row)
            if self._curves:
                self._curves.draw(self._epochs.rows, self._steps.rows, now=False)

    def close(self) -> None:
        """Write the rows and curves that are not written yet."""
        if not self._epochs.is_written:
            with self._warn_on_os_error():
                self._epochs.write()
        self.draw()
        with self._warn_on_os_error():
            self._steps.close()

    def draw(self) -> None:
        """Write the curves of the rows so far."""
        if self._curves:
            with self._warn_on_os_error():
                self._curves.draw(self._epochs.rows, self._steps.rows, now=True)

    @contextlib.contextmanager
    def _warn_on_os_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._log.warn(
                f"cannot write the metrics of the run in {self._folder} ({cause_of(error)}); training continues"
            )
