"""Handles running out of memory: repeats the update with smaller micro-batches, or names the setting to lower."""

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from configs.combinations import CUDA_GRAPH_MODES
from configs.schema import Config
from datasets import Batch, Window
from engine.parallel import is_sharded
from engine.train.guards import RehearsingGuard, RereadableBatches
from engine.train.micro_batches import MicroBatches, cut
from engine.train.trainer import Trainer
from utils.errors import OUT_OF_MEMORY, ConfigError
from utils.log import Log
from utils.text import counted


def shortage(error: Exception) -> str | None:
    """Return the out-of-memory message in one line, or None for any other error."""
    message = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or any(each in message for each in OUT_OF_MEMORY):
        return message.splitlines()[0]
    return None


def release(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


class MemoryGuard(RehearsingGuard):
    """Repeats an update with smaller micro-batches until it fits into memory.

    A single process repeats it immediately. Several processes probe their first two updates together, before any of
    them waits in an all-reduce. If a process runs out of memory later, the run ends. The error names flags to resume.
    """

    def __init__(self, config: Config, trainer: Trainer, log: Log):
        super().__init__(config, trainer)
        self._config, self._log = config, log
        self.order, self.process = trainer.data.order, trainer.process
        self.max_images: int | None = None  # largest micro-batch; None: the loader's batches are not split
        self._has_cuda_graphs = config.COMPILE in CUDA_GRAPH_MODES
        # Two probes, because the first update allocates the optimizer's state. No probes with FSDP: it gathers weights
        # from all processes, so no process can probe alone.
        can_probe = self.process.world_size > 1 and not config.COMPILE and not is_sharded(config, self.process)
        self.probes_left = 2 if can_probe else 0

    def attempts(self, window: Window) -> Iterator[AbstractContextManager[MicroBatches]]:
        batches = RereadableBatches(window.batches)
        self._reason: str | None = None
        if self.probes_left:
            self._probe(window, batches)
        yield from self.rehearse(window, batches)
        self._reason = ""
        while self._reason is not None:
            self._reason = None
            yield self.attempt(window, batches)
            # This is outside `except`, because the error's traceback keeps tensors of the forward pass alive.
            if self._reason is not None:
                self.trainer.replica.zero_grad(set_to_none=True)
                self.halve(window.step, self._reason)

    @contextlib.contextmanager
    def attempt(self, window: Window, batches: RereadableBatches) -> Iterator[MicroBatches]:
        try:
            yield cut(window, batches, self.max_images)
        except RuntimeError as error:
            reason = shortage(error)
            if batches.is_reading or not reason:
                raise
            self._reason = reason
        if self._reason is not None and self.process.world_size > 1:
            raise self.cannot_repeat(window.step, self._reason)

    def _probe(self, window: Window, batches: RereadableBatches) -> None:
        """Halve the micro-batch until an update fits into the memory of each process. Collective."""
        from extras.memory.probe import probe_memory  # local: a single process does not probe

        trainer, largest = self.trainer, max(batches, key=lambda batch: len(batch.targets))
        trainer.notify("on_phase", "other")
        while True:
            parts = [largest] if self.max_images is None else largest.parts(self.max_images)
            # With accumulation, the gradients of the first micro-batch are in memory during the second.
            passes = 2 if len(parts) * window.num_batches > 1 else 1
            reason = probe_memory(trainer.computing.model, partial(self._loss_of, parts[0]), passes)
            if self.process.all_true(reason is None):
                break
            trainer.replica = None  # frees the memory of the replica
            self.halve(window.step, reason)
            trainer.replicate(accumulates=True)
        self.probes_left -= 1

    def _loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, computed by the model itself, because its DDP wrapper would communicate."""
        trainer = self.trainer
        images, targets = trainer.to_device(batch)
        with trainer.precision.autocast():
            logits = trainer.computing.model(images)
        return trainer.loss(logits, targets)

    def halve(self, step: int, reason: str | None) -> None:
        """Halve the micro-batch. Collective. `reason`: the out-of-memory message of this process, if it has one."""
        if reason:
            self._log.note(f"step {step}: {reason}")
        old = self._largest(step)
        if old <= self.order.unit:
            self.process.first(lambda: self._refuse(step))
        if self._has_cuda_graphs:
            raise ConfigError(
                f"COMPILE is {self._config.COMPILE}: memory runs out at step {step}, which cannot be repeated with "
                "smaller micro-batches, because CUDA graphs cannot accumulate gradients; start again, or continue from "
                f"the last save with -resume auto, with these flags: {self._flags(self._half(old))}"
            )
        self.max_images = self._half(old)
        tell = self._log.warn if self.process.is_first else self._log.note
        tell(
            f"out of memory at step {step} with micro-batches of {counted(old, 'image')}; repeating the step and "
            f"continuing with {self.max_images}. Each update still has the same images. To start a run like this: "
            f"{self._flags(self.max_images)}"
        )
        release(self.process.device)

    def cannot_repeat(self, step: int, reason: str) -> ConfigError:
        """Return the error for a process that fails while others wait in an all-reduce and cannot be reached."""
        old = self._largest(step)
        if old <= self.order.unit:
            self._refuse(step)
        flags = self._flags(self._half(old))
        return ConfigError(
            f"DATA.BATCH_SIZE: process {self.process.rank} ran out of memory at step {step} ({reason}), while others "
            f"wait for its gradient; continue from the last save with smaller micro-batches: -resume auto {flags}"
        )

    def _largest(self, step: int) -> int:
        """Return the largest micro-batch of any process. Every process computes the same number by itself."""
        largest = self.order.largest_piece(step)
        return largest if self.max_images is None else min(self.max_images, largest)

    def _half(self, size: int) -> int:
        """Return half the size, rounded up, and rounded to an even number if images are mixed in pairs."""
        unit = self.order.unit
        return -(-size // (2 * unit)) * unit

    def _flags(self, size: int) -> str:
        """Return flags for this micro-batch size, or the next smaller one with the same number of images per update."""
        order, unit = self.order, self.order.unit
        each = order.global_batch // order.world_size
        size = next((size for size in range(size, 0, -unit) if each % size == 0), unit)
        mode = " -compile -opts RESUME.ALLOW_CHANGED=[COMPILE]" if self._has_cuda_graphs else ""
        return f"-batch_size {size} -accum_iter {each // size}{mode}"

    def _refuse(self, step: int) -> None:
        from extras.memory.batch_size import size_of_images

        smallest = "1 image" if self.order.unit == 1 else "2 images (mixup and cutmix take them in pairs)"
        amp = "" if self._config.AMP else ", or use -amp"
        setting, value, what = size_of_images(self._config)
        raise ConfigError(
            f"{setting} is {value}: memory runs out at step {step} even with micro-batches of {smallest}; lower the {what}, "
            f"choose a smaller model (MODEL.NAME is {self._config.MODEL.NAME}){amp}; or stop other programs that use the "
            "device's memory"
        )
