"""Says what torch.compile cost and what it gains, and warns if it compiles late or gives up."""

import time
from statistics import median

import torch
from torch import Tensor

from datasets import Batch
from engine.memory.recovery import probe_memory, release
from engine.precision.policy import synchronize
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Callback, Trainer
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
