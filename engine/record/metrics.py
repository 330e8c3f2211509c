"""Writes a run's metrics to metrics.csv, metrics.jsonl and steps.csv. columns.py defines their columns."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.evaluation.scores import Scores
from engine.record.columns import STEP_COLUMNS, Epoch, Row, epoch_row, start_row
from engine.record.saved_files import read_rows, read_table
from engine.train.callback import Callback
from engine.train.clock import PHASES
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.errors import cause_of, naming_damage
from utils.files import LineFile, write_text
from utils.log import Log
from utils.text import csv_text

if TYPE_CHECKING:
    from engine.record.trackers import Trackers


class EpochRows:
    """Writes metrics.csv and metrics.jsonl with one row per epoch. Metrics that an epoch did not measure are empty."""

    def __init__(self, folder: Path, first_epoch: int):
        """Keep the rows of epochs before `first_epoch`, which an earlier start of this run wrote."""
        self._folder = folder
        self.rows: list[Row] = [row for row in read_rows(folder / "metrics.jsonl") if row["epoch"] < first_epoch]
        self.is_written = True

    def add(self, row: Row) -> None:
        """Add a row and write all rows, including rows that could not be written while the disk was full."""
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
        """Keep the rows of steps before `first_step`. A last line that a kill cut off is dropped."""
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
        """Return a row as a line of the file. Unknown values are empty."""
        return ",".join("" if row.get(name) is None else f"{row[name]:.10g}" for name in self._columns)

    def close(self) -> None:
        self._file.close()


class Recorder(Callback):
    """Writes the metrics of a run in process 0. If the disk is full, the rows are kept for the next write."""

    def __init__(
        self,
        folder: Path,
        log: Log,
        trainer: Trainer,
        trackers: "Trackers | None",
        draw_curves: Callable[..., None],
    ):
        self._folder, self._log = folder, log
        self._trackers, self._draw_curves = trackers, draw_curves
        self._open(trainer)

    def _open(self, trainer: Trainer) -> None:
        has_started = trainer.step or trainer.best.exists or trainer.before
        self._epochs = EpochRows(self._folder, trainer.epoch if has_started else -1)
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
        times = {f"{name}_pct": report.shares.get(name) for name in PHASES}  # data_pct, forward_pct and others
        row = {name: times[name] if name in times else getattr(report, name) for name in STEP_COLUMNS}
        if self._trackers:
            self._trackers.add("step", row)
        with self._warn_on_os_error():
            self._steps.add(row)

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        row = epoch_row(Epoch(trainer, result))
        if self._trackers:
            self._trackers.add("epoch", row)
        with self._warn_on_os_error():
            self._epochs.add(row)
            self._draw_curves(self._epochs.rows, self._steps.rows, now=False)

    def close(self) -> None:
        """Write the rows and curves that are not on disk yet."""
        if not self._epochs.is_written:
            with self._warn_on_os_error():
                self._epochs.write()
        with self._warn_on_os_error():
            self._draw_curves(self._epochs.rows, self._steps.rows, now=True)
        with self._warn_on_os_error():
            self._steps.close()

    @contextlib.contextmanager
    def _warn_on_os_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._log.warn(
                f"cannot write the metrics of the run in {self._folder} ({cause_of(error)}); training continues"
            )
