"""What a run says of its own speed: what torch.compile cost, and what to do where updates wait for data."""

import math
import time
from collections.abc import Callable

from configs.schema import Config
from datasets import ImageSet, choose_workers
from datasets.loading.workers import cores_to_read, saturate_gil
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Callback, Trainer
from utils.distributed import Process
from utils.log import Log
from utils.text import counted
from utils.torch_internals import num_graphs, watch_compiler


class CompileReport(Callback):
    """Logs after the first epoch of a start how many graphs were compiled, and warns of those that come later."""

    def __init__(self, log: Log):
        self._log = log
        self._num_before, self._num_known = num_graphs(), -1  # -1: the first epoch is not over
        self._seconds = self._started = 0.0
        self.close = watch_compiler(self._on_start, self._on_end, self._on_limit)

    def _on_start(self) -> None:
        self._started = time.perf_counter()

    def _on_end(self) -> None:
        self._seconds += time.perf_counter() - self._started

    def _on_limit(self, reason: str) -> None:
        self._log.warn(
            f"compile: {reason}; torch runs what exceeds the limit uncompiled, at the speed without -compile"
        )

    def on_report(self, trainer: Trainer, report: Report) -> None:
        if 0 <= self._num_known < num_graphs():
            more = counted(num_graphs() - self._num_known, "graph")
            self._num_known = num_graphs()
            self._log.warn(f"compile: {more} more by step {report.step}; TORCH_LOGS=recompiles says why")

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        if self._num_known < 0:
            self._log.say(f"compile: {counted(num_graphs() - self._num_before, 'graph')} in {self._seconds:.1f} s")
        self._num_known = num_graphs()  # an evaluation that was due for the first time compiles, too


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
        """The first remedy that applies."""
        # Throughput is proportional to the number of workers. 0 workers: the training process reads.
        kind, count, _ = self._workers
        needed = math.ceil(max(count, fraction) / max(1 - fraction, 1e-3))
        most, on_gpu = cores_to_read(self._process), self._process.device.type != "cpu"
        if count < most:
            cores = counted(self._process.num_cores, "core")
            return f"try -num_workers {min(needed, most)} (now {count}; each process has {cores})"
        if on_gpu and kind == "threads" and saturate_gil(count, self._config, self._image_set):
            return (
                f"{counted(count, 'loader thread')} take turns at Python's lock; try -opts DATA.WORKERS=processes, with "
                "enough shared memory for their batches (-check tells how much)"
            )
        if not self._image_set.in_memory and self._config.DATA.CACHE == "none":
            size = self._config.DATA.IMAGE_SIZE
            return (
                f"there is a worker for each core already; DATA.CACHE={2 * size} keeps images decoded, no larger than "
                f"IMAGE_SIZE {size} needs"
            )
        return None
