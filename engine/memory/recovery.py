"""When memory runs out: how it is told from other errors, and how a window is cut into smaller micro-batches then."""

import gc
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from configs.schema import Config
from datasets import Batch, Window
from datasets.batch_order import Order
from engine.diagnose.trace import unchanged_buffers
from utils.distributed import Process
from utils.errors import OUT_OF_MEMORY, ConfigError
from utils.log import Log


def shortage(error: Exception) -> str | None:
    """How memory ran out, in one line; None for an error that is about something else."""
    message = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or any(each in message for each in OUT_OF_MEMORY):
        return message.splitlines()[0]
    return None


def release(device: torch.device) -> None:
    """Give back the device's memory that nothing holds."""
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def try_out(model: nn.Module, compute: Callable[[], Tensor], passes: int) -> str | None:
    """Forward and backward of a loss, so many times, without a trace in the model. Returns how memory ran out, if so."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = []
    try:
        with unchanged_buffers(model):
            for _ in range(passes):
                # Not backward(): that would call the hooks by which a replica counts gradients.
                kept.append(torch.autograd.grad(compute(), trained, allow_unused=True))
    except RuntimeError as error:
        reason = shortage(error)
        if not reason:
            raise
        return reason
    return None


class Rereadable:
    """Batches that can be gone through again, as far as they were read."""

    def __init__(self, batches: Iterator[Batch]):
        self._batches, self._read = batches, []
        self.is_reading = False  # whether a batch is under way: what fails then has nothing to do with its size

    def __iter__(self) -> Iterator[Batch]:
        yield from self._read
        while True:
            self.is_reading = True
            batch = next(self._batches, None)
            self.is_reading = False
            if batch is None:
                return
            self._read.append(batch)
            yield batch


class MicroBatches:
    """The size of micro-batches: as the settings say, until memory has run out."""

    def __init__(self, config: Config, order: Order, process: Process, log: Log):
        self.config, self.order, self.process, self.log = config, order, process, log
        self.size: int | None = None  # images at most; None: as they come

    def cut(self, window: Window, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Each micro-batch, and whether it is this process's last of the window."""
        for number, batch in enumerate(batches, start=1):
            parts = self.parts(batch)
            for part in parts:
                yield part, number == window.num_batches and part is parts[-1]

    def parts(self, batch: Batch) -> list[Batch]:
        return [batch] if self.size is None else batch.parts(self.size)

    def halve(self, step: int, reason: str | None) -> None:
        """All processes together; `reason`: how memory ran out in this one, if it did."""
        if reason:
            self.log.note(f"step {step}: {reason}")
        old = self._largest(step)
        if old <= self.order.unit:
            self.process.first(lambda: self._refuse(step))
        self.size = self._half(old)
        tell = self.log.warn if self.process.is_first else self.log.note
        tell(
            f"out of memory at step {step} with micro-batches of {old} images; the step is done again with {self.size}, "
            f"and so are all that follow. The images of an update stay the same. To start so: {self._flags(self.size)}"
        )
        release(self.process.device)

    def cannot_repeat(self, step: int, reason: str) -> ConfigError:
        """The error of one of several processes that runs out: the others wait for its gradient and cannot be called back."""
        old = self._largest(step)
        if old <= self.order.unit:
            self._refuse(step)
        return ConfigError(
            f"DATA.BATCH_SIZE: process {self.process.rank} ran out of memory at step {step} ({reason}), while others wait "
            "for its gradient; go on from the last save with smaller micro-batches: -resume auto "
            f"{self._flags(self._half(old))}"
        )

    def _largest(self, step: int) -> int:
        """Images of the largest micro-batch of any process: the same number everywhere, without asking."""
        largest = self.order.largest_piece(step)
        return largest if self.size is None else min(self.size, largest)

    def _half(self, size: int) -> int:
        """Rounded up, and even where images are mixed in pairs."""
        unit = self.order.unit
        return -(-size // (2 * unit)) * unit

    def _flags(self, size: int) -> str:
        """For micro-batches of that size, or the next smaller one that gives the same images an update."""
        order, unit = self.order, self.order.unit
        each = order.global_batch // order.world_size
        size = next((size for size in range(size, 0, -unit) if each % size == 0), unit)
        return f"-batch_size {size} -accum_iter {each // size}"

    def _refuse(self, step: int) -> None:
        least = "1 image" if self.order.unit == 1 else "2 images (mixup and cutmix take them in pairs)"
        amp = "" if self.config.AMP else ", or use -amp"
        raise ConfigError(
            f"DATA.IMAGE_SIZE is {self.config.DATA.IMAGE_SIZE}: memory runs out at step {step} even with micro-batches "
            f"of {least}; lower it, take a smaller model (MODEL.NAME is {self.config.MODEL.NAME}){amp}; or end what else "
            "uses the device's memory"
        )
