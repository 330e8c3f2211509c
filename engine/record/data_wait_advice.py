"""Advice for a run that waits for its data."""

import math
from collections.abc import Callable

from configs.schema import Config
from datasets import ImageSet, choose_workers
from datasets.loading.workers import cores_to_read, saturate_gil
from engine.train.counters import Report
from engine.train.trainer import Callback, Trainer
from utils.distributed import Process
from utils.text import counted

LIMIT = 20.0  # percent of the time
ENOUGH_UPDATES = 10  # before it judges; the first report contains start-up and is ignored


class DataWaitAdvice(Callback):
    """Logs once what to change if updates wait for data."""

    def __init__(self, config: Config, image_set: ImageSet, process: Process, say: Callable[[str], None]):
        self._config, self._image_set, self._say = config, image_set, say
        self._workers = choose_workers(config, image_set, process)
        self._process = process
        self._judged: int | None = None  # step at which it judged last
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
        remedy = self._remedy(percent / 100) if percent > LIMIT else None
        self._is_given = remedy is not None
        if remedy:
            self._say(f"{percent:.0f}% of the time is spent waiting for data: {remedy}")

    def _remedy(self, fraction: float) -> str | None:
        """The first remedy that applies."""
        size = 2 * self._config.DATA.IMAGE_SIZE
        # Throughput is proportional to the number of workers. 0 workers: the training process reads.
        kind, count, _ = self._workers
        needed = math.ceil(max(count, fraction) / max(1 - fraction, 1e-3))
        most, on_gpu = cores_to_read(self._process), self._process.device.type != "cpu"
        remedies = [
            (
                count < most,
                f"try -num_workers {min(needed, most)} (now {count}; each process has "
                f"{counted(self._process.num_cores, 'core')})",
            ),
            (
                on_gpu and kind == "threads" and saturate_gil(count, self._config, self._image_set),
                f"{counted(count, 'loader thread')} take turns at Python's lock; try -opts DATA.WORKERS=processes, with "
                "enough shared memory for their batches (-check tells how much)",
            ),
            (
                not self._image_set.in_memory and self._config.DATA.CACHE == "none",
                "there is a worker for each core already; DATA.CACHE=disk keeps images decoded, with "
                f"DATA.CACHE_SIDE={size} no larger than IMAGE_SIZE {self._config.DATA.IMAGE_SIZE} needs",
            ),
        ]
        return next((text for applies, text in remedies if applies), None)
