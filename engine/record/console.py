"""Training output: log lines in PaddleViT's format, a progress bar, and one line per epoch on a terminal."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from configs.schema import Config
from configs.tables import METRICS
from engine.evaluation.best import Best
from engine.evaluation.scores import Scores, format_value
from engine.record.columns import COLUMNS, Epoch, Row, epoch_row, machine_texts, terminal_text, training_texts
from engine.train.callback import Callback
from engine.train.counters import EpochResult, Report
from engine.train.forecast import Forecast
from engine.train.stop_conditions import ADVICE
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.log import Log
from utils.text import counted, format_time, warning

LINES_BELOW_A_HEAD = 40
SECONDS = 1.0  # the shortest time between two refreshes of the metrics in the progress bar


class Console(Callback):
    """A callback that shows the progress of training. Accuracies in PaddleViT's format are fractions in [0, 1]."""

    def __init__(self, config: Config, log: Log, forecast: Forecast, clock: Callable = time.monotonic):
        self._config, self._log, self._forecast, self._clock = config, log, forecast, clock
        self._printer = EpochPrinter(config, config.TRAIN.MODEL_EMA)
        self._report: Report | None = None  # the last report of this epoch
        self._read = 0.0  # the time at which the metrics in the bar were last read from the device

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._report = None
        self._log.describe_bar(lambda: self._describe(trainer))

    def on_update(self, trainer: Trainer) -> None:
        """Refresh the metrics in the progress bar, at most once a second, because reading them waits for the device.

        Until the next report, the metrics cover only this process's images, because this method uses no collectives.
        """
        if not self._log.on_terminal or self._clock() < self._read + SECONDS:
            return
        if self._report:
            self._report = replace(self._report, **trainer.counters.read(Process(trainer.process.device)))
        self._read = self._clock()
        self._log.describe_bar(lambda: self._describe(trainer))

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._report, self._read = report, self._clock()
        self._log.describe_bar(lambda: self._describe(trainer))
        steps_per_epoch = trainer.data.steps_per_epoch
        accuracy = f", Avg Acc: {report.accuracy:.4f}" if math.isfinite(report.accuracy) else ""
        self._log.detail(
            f"Epoch[{report.epoch + 1:03d}/{trainer.schedule.num_epochs:03d}], "
            f"Step[{report.step % steps_per_epoch:04d}/{steps_per_epoch:04d}], Lr: {report.lr:.6f}, "
            f"Loss: {report.loss:.4f} ({report.mean_loss:.4f}){accuracy}"
        )

    def _describe(self, trainer: Trainer) -> str:
        """Return the text at the end of the progress bar."""
        left, report = self._forecast.left(trainer, trainer.epoch), self._report
        parts = [f"{format_time(left)} left"] if left is not None else []
        if report:
            parts.append(f"loss {report.mean_loss:.3f}")
            parts += [f"acc {report.accuracy:.1%}"] if math.isfinite(report.accuracy) else []
            parts += [f"scale {report.loss_scale:g}"] if report.loss_scale != 1 else []
        return ", ".join(parts)

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        epoch = Epoch(trainer, result)
        row, num_epochs = epoch_row(epoch), trainer.schedule.num_epochs
        for line in self._printer.log_lines(row, epoch, num_epochs):
            self._log.detail(line)
        if number := result.report.infinite:
            self._log.say(
                warning(
                    f"epoch {trainer.epoch + 1}: the training loss of {counted(number, 'image')} was infinite, "
                    f"although the gradients were finite; the mean loss leaves them out; {ADVICE}"
                )
            )
        if trainer.process.is_first:
            left = self._forecast.left(trainer, trainer.epoch + 1)
            for line in self._printer.terminal_lines(row, result.scores, trainer.best, left, num_epochs):
                self._log.show(line)


def describe_times(times: Mapping[str, float | None]) -> str:
    """Return the percentage of the time in each phase as text, without phases below 0.05%."""
    names = {"data": "waiting for data"}
    shown = {names.get(name, name): share for name, share in times.items() if share and share >= 0.05}
    return ", ".join(f"{share:.1f}% {name}" for name, share in shown.items())


class EpochPrinter:
    """Formats an epoch's metrics: as lines in PaddleViT's format for log.txt, and as a table row for a terminal."""

    def __init__(self, config: Config, has_ema: bool):
        self._has_ema = has_ema
        # The metric in the top-1 column is BEST_METRIC, or the task's own metric if that is the loss, which has a
        # column.
        self._metric = config.task.metrics[0] if config.TRAIN.BEST_METRIC == "loss" else config.TRAIN.BEST_METRIC
        self._num_rows = 0

    def log_lines(self, row: Row, epoch: Epoch, num_epochs: int) -> list[str]:
        """Return an epoch's log lines. `row` is its row in metrics.csv. Only process 0 logs speed and memory."""
        head = f"----- Epoch[{epoch.trainer.epoch + 1:03d}/{num_epochs:03d}], "
        lines = [f"{head}{', '.join(training_texts(row))}"]
        for suffix, scores in epoch.result.scores.items():
            described = scores.describe("EMA Validation" if suffix else "Validation")
            lines.append(f"{head}{described}, time: {row['eval_seconds']:.2f}")
        if epoch.trainer.process.is_first:
            lines += [f"      {', '.join(machine_texts(row))}", f"      time: {describe_times(epoch.result.times)}"]
        return lines

    def terminal_lines(
        self, row: Row, scores: Mapping[str, Scores], best: Best, seconds_left: float | None, num_epochs: int
    ) -> list[str]:
        """Return an epoch's line for a terminal. A header precedes every LINES_BELOW_A_HEAD lines.

        `row` is the epoch's row of metrics.csv, and `best` already includes this epoch.
        """
        columns = [*self._columns(row, scores, best, num_epochs)]
        columns.append(("left", 8, "-" if seconds_left is None else format_time(seconds_left)))
        head = "  ".join(title.rjust(width) for title, width, _ in columns)
        line = "  ".join(text.rjust(width) for _, width, text in columns)
        line += f"  {counted(row['skipped'], 'update')} skipped" if row["skipped"] else ""
        self._num_rows += 1
        return [head, line] if self._num_rows % LINES_BELOW_A_HEAD == 1 else [line]

    def _columns(
        self, row: Row, scores: Mapping[str, Scores], best: Best, num_epochs: int
    ) -> Iterator[tuple[str, int, str]]:
        """Yield (title, width, text) of each column on a terminal. The metric in self._metric replaces top-1."""
        for column in COLUMNS:
            if column.name == "epoch":
                yield "epoch", 2 * len(str(num_epochs)) + 3, f"{row['epoch'] + 1}/{num_epochs}"
            elif column.name == "eval_top1":
                title, width = METRICS[self._metric].title, max(7, len(METRICS[self._metric].title))
                yield title, width, self._show(scores.get(""))
                if self._has_ema:
                    yield f"EMA {title}", 4 + width, self._show(scores.get("_ema"))
                star = "*" if best.epoch == row["epoch"] + 1 else ""
                yield "best", 8, f"{star}{format_value(best.metric, best.value)}" if best.exists else "-"
            elif column.title:
                yield column.title, column.width, terminal_text(column, row[column.name])

    def _show(self, scores: Scores | None) -> str:
        return format_value(self._metric, getattr(scores, self._metric)) if scores else "-"
