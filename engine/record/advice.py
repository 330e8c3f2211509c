"""What a run says of its own speed: what torch.compile cost and gains, and what to do where updates wait for data."""

import math
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from configs.schema import Config
from datasets import Batch, ImageSet, choose_workers
from datasets.loading.workers import cores_to_read, saturate_gil
from engine.memory.recovery import probe_memory, release
from engine.precision.policy import synchronize
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Callback, Trainer
from utils.distributed import Process
from utils.log import Log
from utils.text import counted
from utils.torch_internals import num_graphs, watch_compiler

NUM_TIMED = 3  # passes with the compiled model, and as many without, in turn; one more of each comes first


class CompileReport(Callback):
    """Logs one line after the first epoch of a start. It measures with a batch of that epoch, on this process alone."""

    def __init__(self, log: Log, can_measure: bool):
        """`can_measure`: this process can compute without the others."""
        self._log, self._can_measure = log, can_measure
        self._num_before, self._num_known = num_graphs(), -1  # -1: the first epoch is not over
        self._seconds = self._started = 0.0
        self._step, self._batch = -1, None  # the largest micro-batch so far
        self.close = watch_compiler(self._on_start, self._on_end, self._on_limit)

    def _on_start(self) -> None:
        self._started = time.perf_counter()

    def _on_end(self) -> None:
        self._seconds += time.perf_counter() - self._started

    def _on_limit(self, reason: str) -> None:
        self._log.warn(
            f"compile: {reason}; torch runs what exceeds the limit uncompiled, at the speed without -compile"
        )

    def on_window(self, trainer: Trainer) -> None:
        if trainer.step == self._step:  # repeated with smaller micro-batches
            self._batch = None
        self._step = trainer.step

    def on_micro_batch(self, trainer: Trainer, batch: Batch, share: float) -> None:
        is_wanted = self._num_known < 0 and self._can_measure
        if is_wanted and (self._batch is None or batch.num_samples > self._batch.num_samples):
            self._batch = batch

    def on_report(self, trainer: Trainer, report: Report) -> None:
        if 0 <= self._num_known < num_graphs():
            more = counted(num_graphs() - self._num_known, "graph")
            self._num_known = num_graphs()
            self._log.warn(f"compile: {more} more by step {report.step}; TORCH_LOGS=recompiles says why")

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        if self._num_known < 0:
            cost = f"compile: {counted(num_graphs() - self._num_before, 'graph')} in {self._seconds:.1f} s"
            gain = self._describe_gain(trainer) if self._batch else ""
            self._log.say(f"{cost}{gain}")
            self._batch = None
        self._num_known = num_graphs()  # an evaluation that was due for the first time compiles, too

    def _describe_gain(self, trainer: Trainer) -> str:
        times = measure(trainer, self._batch)
        images = counted(self._batch.num_samples, "image")
        if times is None:
            return f"; {images} at once do not fit into memory without -compile"
        compiled, eager = times
        line = f"; forward and backward of {images}: {1000 * compiled:.1f} ms, without -compile {1000 * eager:.1f} ms"
        if compiled >= eager:
            return f"{line}; leave -compile out"
        return f"{line}, so that it pays off after {counted(round(self._seconds / (eager - compiled)), 'such batch')}"


def measure(trainer: Trainer, batch: Batch) -> tuple[float, float] | None:
    """Seconds of a forward and backward, compiled and not; None if memory does not suffice without."""
    device, model = trainer.process.device, trainer.computing.model
    seconds = {"default": [], "force_eager": []}

    def compute() -> Tensor:
        with trainer.precision.autocast():
            logits = model(images)
        return trainer.loss(logits, targets)

    images, targets = trainer.to_device(batch)
    for stance in [*seconds] * (1 + NUM_TIMED):
        synchronize(device)
        start = time.perf_counter()
        with torch.compiler.set_stance(stance):
            shortage = probe_memory(model, compute, passes=1)
        synchronize(device)
        seconds[stance].append(time.perf_counter() - start)
        if shortage:
            break
    release(device)
    if device.type in ("cuda", "xpu"):  # the peak that is reported is the training's
        getattr(torch, device.type).reset_peak_memory_stats(device)
    return None if shortage else tuple(median(found[1:]) for found in seconds.values())


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
