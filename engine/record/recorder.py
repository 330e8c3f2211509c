"""Writes the figures of a run into its folder: metrics.csv, steps.csv, shadow.csv, TensorBoard, curves."""

import contextlib
import math
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from configs.schema import Config
from engine.record.board import pictures_in
from engine.record.metrics import Metrics, StepRows
from engine.record.plot import Plotter
from engine.record.tensorboard import TensorBoard
from engine.record.timing import Timing, shares
from engine.train.counters import EpochResult, Report
from engine.train.trainer import PHASES, Callback, Trainer
from utils.errors import cause_of
from utils.log import Log

STEP_FIGURES = ("step", "epoch", "lr", "loss", "mean_loss", "grad_norm", "loss_scale", "skipped", "seconds")


class Recorder(Callback):
    """Writes the figures of a run, in process 0. A full disk does not end a run: rows are kept for the next write."""

    def __init__(self, config: Config, folder: Path, log: Log, timing: Timing, trainer: Trainer):
        self._config, self._folder, self._log, self._timing, self._trainer = config, folder, log, timing, trainer
        title = f"{config.MODEL.NAME} on {config.DATA.DATASET}"
        self._plotter = Plotter(folder, title, config.TRAIN.BEST_METRIC)
        self._open(trainer)

    def _open(self, trainer: Trainer) -> None:
        self._metrics = Metrics(self._folder, trainer.epoch)
        self._steps = StepRows(self._folder, trainer.step, (*STEP_FIGURES, *(f"{name}_pct" for name in PHASES)))
        self._board = TensorBoard(self._folder, trainer.step, self._config) if self._config.TENSORBOARD else None

    def on_rollback(self, trainer: Trainer) -> None:
        self._close()
        self._open(trainer)

    def on_report(self, trainer: Trainer, report: Report) -> None:
        row = {name: getattr(report, name) for name in STEP_FIGURES}
        with self._warn_on_os_error():
            row |= {f"{name}_pct": share for name, share in report.shares.items()}
            self._steps.add(row)
            if self._board:
                if not self._board.is_open:
                    self._board.open()
                    self._timing.restart()  # importing TensorBoard takes half a second and belongs to no phase
                self._board.add_steps([row])

    def add_comparison(self, row: dict[str, float]) -> None:
        """Add a row to shadow.csv: how far half precision deviates."""
        path = self._folder / "shadow.csv"
        is_new = not path.exists()
        with self._warn_on_os_error():
            with open(path, "a") as file:
                if is_new:
                    print(*row, sep=",", file=file)
                print(*(f"{value:.10g}" for value in row.values()), sep=",", file=file)
            if self._board:
                figures = {f"shadow/{name}": value for name, value in row.items() if name != "step"}
                self._board.add(figures, row["step"])

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        times = shares(self._timing.epoch_seconds, trainer.process.device)
        row = epoch_row(trainer, result, times["data"])
        with self._warn_on_os_error():
            self._metrics.add(row)
            if self._board:
                self._board.add_epochs([row])
            self._plotter.draw(self._metrics.rows, self._steps.rows, now=False)

    def close(self) -> None:
        if self._board and self._board.is_open:
            best = self._trainer.best
            with self._warn_on_os_error():
                for path in pictures_in(self._folder):
                    self._board.add_picture(path)
                if best.epoch:
                    self._board.show_best({best.metric: best.value, "epoch": best.epoch})
        self._close()

    def _close(self) -> None:
        """Write what is left to write."""
        if not self._metrics.is_written:
            with self._warn_on_os_error():
                self._metrics.write()
        with self._warn_on_os_error():
            self._plotter.draw(self._metrics.rows, self._steps.rows, now=True)
        with self._warn_on_os_error():
            self._steps.close()
        if self._board:
            with self._warn_on_os_error():
                self._board.close()

    @contextlib.contextmanager
    def _warn_on_os_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._log.warn(
                f"cannot write the figures of the run in {self._folder} ({cause_of(error)}); training continues"
            )


def epoch_row(trainer: Trainer, result: EpochResult, data_wait: float | None) -> dict[str, float | None]:
    """One row of metrics.csv, under timm's names; accuracies in percent."""
    report = result.report
    row = {
        "epoch": trainer.epoch,
        "train_loss": finite(report.mean_loss),
        "eval_loss": None,
        "eval_top1": None,
        "eval_top5": None,
        "lr": report.lr,
        "train_top1": finite(100 * report.accuracy),
    }
    for suffix, scores in result.scores.items():
        row[f"eval_loss{suffix}"] = finite(scores.loss)
        row[f"eval_top1{suffix}"] = round(scores.top1, 4)
        row[f"eval_top5{suffix}"] = round(scores.top5, 4)
        row |= {f"eval_{name}{suffix}": round(value, 4) for name, value in scores.more().items()}
    return row | {
        "step": trainer.step,
        "images_per_s": round(result.num_images / max(result.training_seconds, 1e-9), 1),
        "data_wait_pct": data_wait,
        "memory_mb": round(peak_memory(trainer.process.device) / 2**20),
        "loss_scale": report.loss_scale,
        "skipped": report.skipped,
        "grad_norm": round(report.mean_grad_norm, 6),
        "train_seconds": round(result.training_seconds, 3),
        "eval_seconds": round(result.evaluation_seconds, 3),
    }


def finite(value: float) -> float | None:
    """Rounded for a table; None for NaN (every update was skipped), which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the device if it counts them, otherwise of this process."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
