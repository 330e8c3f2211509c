"""Callbacks that give advice once: if updates wait for data, and if validation images are also training images."""

import math
from collections.abc import Callable

from configs.schema import Config
from datasets import ImageSet, choose_workers
from datasets.build import cores_to_read
from datasets.overlap import Overlap
from engine.train.callback import Callback
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.text import counted

LIMIT = 20.0  # percentage of the time spent waiting for data, above which the advice is logged
ENOUGH_UPDATES = 10  # minimum number of updates between two checks; the first report includes start-up and is ignored


class DataWaitAdvice(Callback):
    """A callback that logs advice once if updates wait for data. Images in memory need none."""

    def __init__(self, config: Config, image_set: ImageSet, process: Process, say: Callable[[str], None]):
        self._config, self._say = config, say
        self._workers = choose_workers(config, image_set, process)
        self._process = process
        self._judged: int | None = None  # step of the last check; None before the first report
        # Sums over the reports since the last check: seconds times waiting percentage, and seconds.
        self._waiting = self._seconds = 0.0
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
        """Return the first remedy that applies, or None. `fraction`: the share of time spent waiting."""
        data = self._config.DATA
        # Throughput is assumed to be proportional to the number of workers. With 0, the training process reads images.
        count = self._workers.count
        needed = math.ceil(max(count, fraction) / max(1 - fraction, 1e-3))
        most = cores_to_read(self._process)
        if count < most:
            cores = counted(self._process.num_cores, "core")
            return f"try -num_workers {min(needed, most)} (now {count}; each process has {cores})"
        if data.CACHE == "none":
            size = min(data.shape)
            return (
                f"each core already has a worker; set DATA.CACHE={2 * size} to cache decoded images, shrunk to twice "
                f"IMAGE_SIZE {size}"
            )
        return None


class TrainedOnAdvice(Callback):
    """A callback that warns once, after the first evaluated epoch, of validation images that are also training images.

    Every process needs this callback, because the comparison is a collective.
    """

    def __init__(self, overlap: Overlap, say: Callable[[str], None], describe: Callable[..., None]):
        """`describe` adds the number of these images to status.json."""
        self._overlap, self._say, self._describe = overlap, say, describe
        self._is_due = overlap.is_open

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        if not (self._is_due and result.scores):
            return
        for line in self._overlap.compare():
            self._say(line)
        self._describe(validation_images_in_training=self._overlap.val.watch.num_in_training)
        self._is_due = False
