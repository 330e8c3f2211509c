"""What is said of the training while it goes on: PaddleViT's lines, and on a terminal a bar and a line an epoch."""

from collections.abc import Mapping

import torch

from configs.schema import Config
from engine.record.epoch_table import EpochTable
from engine.record.heartbeat import Pace
from engine.record.recorder import peak_memory
from engine.record.timing import Timing, shares
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Callback, Trainer
from utils.log import Log
from utils.text import counted, format_time


class Console(Callback):
    """Says how the training goes on. Accuracies in PaddleViT's format are fractions in [0, 1]."""

    def __init__(self, config: Config, log: Log, timing: Timing, pace: Pace, has_ema: bool):
        self._config, self._log, self._timing, self._pace = config, log, timing, pace
        self._table = EpochTable(config, has_ema)
        self._report: Report | None = None  # the last of this epoch

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._report = None
        self._log.describe_bar(lambda: self._describe(trainer))

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._report = report
        steps_per_epoch = trainer.data.steps_per_epoch
        self._log.detail(
            f"Epoch[{report.epoch + 1:03d}/{self._config.TRAIN.NUM_EPOCHS:03d}], "
            f"Step[{report.step % steps_per_epoch:04d}/{steps_per_epoch:04d}], Lr: {report.lr:.6f}, "
            f"Loss: {report.loss:.4f} ({report.mean_loss:.4f}), Avg Acc: {report.accuracy:.4f}"
        )

    def _describe(self, trainer: Trainer) -> str:
        """For the end of the bar; called by a thread, so it reads nothing of the device."""
        left, report = self._pace.seconds_left(trainer.step), self._report
        parts = [f"{format_time(left)} left"] if left is not None else []
        if report:
            parts += [f"loss {report.mean_loss:.3f}", f"acc {report.accuracy:.1%}"]
            parts += [f"scale {report.loss_scale:g}"] if report.loss_scale != 1 else []
        return ", ".join(parts) or "first update"

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        head, report = f"----- Epoch[{trainer.epoch + 1:03d}/{self._config.TRAIN.NUM_EPOCHS:03d}], ", result.report
        self._log.detail(
            f"{head}Train Loss: {report.mean_loss:.4f}, Train Acc: {report.accuracy:.4f}, "
            f"time: {result.training_seconds:.2f}"
        )
        for suffix, scores in result.scores.items():
            name = "EMA Validation" if suffix else "Validation"
            self._log.detail(f"{head}{scores.describe(name)}, time: {result.evaluation_seconds:.2f}")
        if trainer.process.is_first:
            self._log.detail(f"      {describe_speed(result, trainer.process.device)}")
            times = shares(self._timing.epoch_seconds, trainer.process.device)
            self._log.detail(f"      time: {describe_times(times)}")
        left = self._pace.seconds_left(trainer.step)
        for line in self._table.lines(trainer.epoch + 1, result, trainer.best, left):
            self._log.show(line)


def describe_speed(result: EpochResult, device: torch.device) -> str:
    """Speed and memory; loss scale and skipped updates only where there is something to say of them."""
    report = result.report
    parts = [
        f"{result.num_images / max(result.training_seconds, 1e-9):.1f} images/s",
        f"{peak_memory(device) / 2**20:.0f} MB",
    ]
    parts += [f"loss scale {report.loss_scale:g}"] if report.loss_scale != 1 else []
    parts += [f"{counted(report.skipped, 'update')} skipped"] if report.skipped else []
    return ", ".join(parts)


def describe_times(times: Mapping[str, float | None]) -> str:
    """The share of each phase that took any time."""
    names = {"data": "waiting for data"}
    return ", ".join(
        f"{share:.1f}% {names.get(name, name)}" for name, share in times.items() if share and share >= 0.05
    )
