"""What a run shows of its training: PaddleViT's lines, on a terminal a bar and a line an epoch, and what to do where it waits."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from configs.schema import Config
from datasets import ImageSet, choose_workers
from datasets.loading.workers import cores_to_read
from engine.evaluation.scores import TITLES, Best, Scores, format_value
from engine.record.metrics import COLUMNS, Epoch, Row, epoch_row, peak_memory
from engine.record.timing import Timing, shares
from engine.train.callback import Callback
from engine.train.counters import EpochResult, Report
from engine.train.forecast import Forecast
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.log import Log
from utils.text import counted, format_time

if TYPE_CHECKING:
    from datasets.overlap import Overlap

LINES_BELOW_A_HEAD = 40
SECONDS = 1.0  # at least, between two readings of the figures for the bar


class Console(Callback):
    """Shows how the training goes on. Accuracies in PaddleViT's format are fractions in [0, 1]."""

    def __init__(self, config: Config, log: Log, timing: Timing, forecast: Forecast, clock: Callable = time.monotonic):
        self._config, self._log, self._timing, self._forecast, self._clock = config, log, timing, forecast, clock
        self._table = EpochTable(config, config.TRAIN.MODEL_EMA)
        self._report: Report | None = None  # the last of this epoch
        self._read = 0.0  # when its figures were read

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._report = None
        self._log.describe_bar(lambda: self._describe(trainer))

    def on_update(self, trainer: Trainer) -> None:
        """Renew the figures of the bar where a person sees it, at most once a second: the host waits for the device then.

        They are those of this process's images until the next report, since the others do not take part.
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
        self._log.detail(
            f"Epoch[{report.epoch + 1:03d}/{trainer.schedule.num_epochs:03d}], "
            f"Step[{report.step % steps_per_epoch:04d}/{steps_per_epoch:04d}], Lr: {report.lr:.6f}, "
            f"Loss: {report.loss:.4f} ({report.mean_loss:.4f}), Avg Acc: {report.accuracy:.4f}"
        )

    def _describe(self, trainer: Trainer) -> str:
        """Return the end of the bar."""
        left, report = self._forecast.left(trainer, trainer.epoch), self._report
        parts = [f"{format_time(left)} left"] if left is not None else []
        if report:
            parts += [f"loss {report.mean_loss:.3f}", f"acc {report.accuracy:.1%}"]
            parts += [f"scale {report.loss_scale:g}"] if report.loss_scale != 1 else []
        return ", ".join(parts)

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        head, report = f"----- Epoch[{trainer.epoch + 1:03d}/{trainer.schedule.num_epochs:03d}], ", result.report
        self._log.detail(
            f"{head}Train Loss: {report.mean_loss:.4f}, Train Acc: {report.accuracy:.4f}, "
            f"time: {result.training_seconds:.2f}"
        )
        for suffix, scores in result.scores.items():
            name = "EMA Validation" if suffix else "Validation"
            self._log.detail(f"{head}{scores.describe(name)}, time: {result.evaluation_seconds:.2f}")
        if trainer.process.is_first:
            epoch = Epoch(trainer, result, shares(self._timing.epoch_seconds, trainer.process.device))
            self._log.detail(f"      {describe_speed(epoch)}")
            self._log.detail(f"      time: {describe_times(epoch.times)}")
            left = self._forecast.left(trainer, trainer.epoch + 1)
            self._table.num_epochs = trainer.schedule.num_epochs
            for line in self._table.lines(epoch_row(epoch), result.scores, trainer.best, left):
                self._log.show(line)


def describe_speed(epoch: Epoch) -> str:
    """Speed and memory; loss scale and skipped updates only where there is something to say of them."""
    report, memory = epoch.result.report, peak_memory(epoch.trainer.process.device)
    parts = [f"{epoch.images_per_s:.1f} images/s", f"{memory / 2**20:.0f} MB"]
    parts += [f"loss scale {report.loss_scale:g}"] if report.loss_scale != 1 else []
    parts += [f"{counted(report.skipped, 'update')} skipped"] if report.skipped else []
    return ", ".join(parts)


def describe_times(times: Mapping[str, float | None]) -> str:
    """The share of each phase that took any time."""
    names = {"data": "waiting for data"}
    shown = {names.get(name, name): share for name, share in times.items() if share and share >= 0.05}
    return ", ".join(f"{share:.1f}% {name}" for name, share in shown.items())


class EpochTable:
    """Makes the lines; the head stands above the first one, and again where it has left the screen."""

    def __init__(self, config: Config, has_ema: bool):
        self.num_epochs, self._has_ema = config.TRAIN.NUM_EPOCHS, has_ema
        # The one that decides which epoch is best; the loss has a column of its own.
        instead_of_loss = "map" if config.DATA.has_several_labels else "top1"
        self._metric = instead_of_loss if config.TRAIN.BEST_METRIC == "loss" else config.TRAIN.BEST_METRIC
        self._num_lines = 0

    def lines(self, row: Row, scores: Mapping[str, Scores], best: Best, seconds_left: float | None) -> list[str]:
        """The line of an epoch, below a head where one is due. `row`: of metrics.csv; `best` includes this epoch."""
        columns = [*self._columns(row, scores, best)]
        columns.append(("left", 8, "-" if seconds_left is None else format_time(seconds_left)))
        head = "  ".join(title.rjust(width) for title, width, _ in columns)
        line = "  ".join(text.rjust(width) for _, width, text in columns)
        line += f"  {counted(row['skipped'], 'update')} skipped" if row["skipped"] else ""
        self._num_lines += 1
        return [head, line] if self._num_lines % LINES_BELOW_A_HEAD == 1 else [line]

    def _columns(self, row: Row, scores: Mapping[str, Scores], best: Best) -> Iterator[tuple[str, int, str]]:
        """(title, width, text) of the columns of metrics.csv that have a title; the score that decides stands in the place of
        top-1."""
        for column in COLUMNS:
            if column.name == "epoch":
                yield "epoch", 2 * len(str(self.num_epochs)) + 3, f"{row['epoch'] + 1}/{self.num_epochs}"
            elif column.name == "eval_top1":
                title, width = TITLES[self._metric], max(7, len(TITLES[self._metric]))
                yield title, width, self._show(scores.get(""))
                if self._has_ema:
                    yield f"EMA {title}", 4 + width, self._show(scores.get("_ema"))
                is_new = best.epoch == row["epoch"] + 1
                yield "best", 8, f"{'*' * is_new}{format_value(best.metric, best.value)}" if best.epoch else "-"
            elif column.title:
                value = row[column.name]
                yield column.title, column.width, "-" if value is None else column.text(value)

    def _show(self, scores: Scores | None) -> str:
        return format_value(self._metric, getattr(scores, self._metric)) if scores else "-"


LIMIT = 20.0  # percent of the time
ENOUGH_UPDATES = 10  # before it judges; the first report contains start-up and is ignored


class DataWaitAdvice(Callback):
    """Logs once what to change if updates wait for data."""

    def __init__(self, config: Config, image_set: ImageSet, process: Process, say: Callable[[str], None]):
        self._config, self._image_set, self._say = config, image_set, say
        self._workers = choose_workers(config, image_set, process)
        self._process = process
        self._judged: int | None = None  # step at which it judged last; None before the first report
        self._waiting = self._seconds = 0.0  # since then
        self._is_given = False

    def on_report(self, trainer: Trainer, report: Report) -> None:
        if self._judged is None:
            self._judged = report.step
            return
        self._waiting += report.shares["data"] * report.seconds
        self._seconds += report.seconds
        if self._is_given or report.step - self._judged < ENOUGH_UPDATES:
            return
        percent = self._waiting / max(self._seconds, 1e-9)
        self._judged, self._waiting, self._seconds = report.step, 0.0, 0.0
        if percent > LIMIT and (remedy := self._remedy(percent / 100)):
            self._say(f"{percent:.0f}% of the time is spent waiting for data: {remedy}")
            self._is_given = True

    def _remedy(self, fraction: float) -> str | None:
        """The first remedy that applies; none for images in memory, of which the first batches alone take time."""
        data = self._config.DATA
        if self._image_set.in_memory:
            return None
        # Throughput is proportional to the number of workers. 0 workers: the training process reads.
        count = self._workers.count
        needed = math.ceil(max(count, fraction) / max(1 - fraction, 1e-3))
        most = cores_to_read(self._process)
        if count < most:
            cores = counted(self._process.num_cores, "core")
            return f"try -num_workers {min(needed, most)} (now {count}; each process has {cores})"
        if data.CACHE == "none":
            size = data.IMAGE_SIZE
            return (
                f"there is a worker for each core already; DATA.CACHE={2 * size} keeps images decoded, no larger than "
                f"IMAGE_SIZE {size} needs"
            )
        return None


class TrainedOnAdvice(Callback):
    """Logs once, after the first evaluated epoch, how many validation images are training images. In every process."""

    def __init__(self, overlap: "Overlap", process: Process, say: Callable[[str], None]):
        self._overlap, self._process, self._say = overlap, process, say

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        if not (self._overlap and result.scores):
            return
        for line in self._overlap.compare(self._process):
            self._say(line)
        self._overlap = None
