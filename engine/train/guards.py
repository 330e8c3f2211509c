"""The guards of an update, which decide how often its micro-batches are computed and how large they are."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from configs.schema import Config
from datasets import Batch, Window
from engine.parallel import is_sharded
from engine.train.micro_batches import Guard, MicroBatches, cut
from engine.train.trainer import Trainer
from models.parts import unchanged_buffers
from utils.log import Log


def choose_guard(config: Config, trainer: Trainer, log: Log) -> Guard:
    """Return the guard of a run, which handles out-of-memory errors."""
    from extras.memory.guard import MemoryGuard

    return MemoryGuard(config, trainer, log)


class RereadableBatches:
    """Keeps the batches of an iterator, so that they can be read again."""

    def __init__(self, batches: Iterator[Batch]):
        self._batches, self._read = batches, []
        self.is_reading = False  # while True, an error comes from the loader, not from the computation

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


class RehearsingGuard(Guard):
    """Computes the first update three times if there are more than two processes. Only the last computation counts.

    DDP rearranges the gradients in its buckets after its second pass. With more than two processes, the place of
    a gradient changes the last bit of its average, so a resumed run would differ from an uninterrupted run.
    """

    def __init__(self, config: Config, trainer: Trainer):
        self.trainer = trainer
        process = trainer.process
        self.rehearsals_left = 2 if process.world_size > 2 and not is_sharded(config, process) else 0

    def attempts(self, window: Window) -> Iterator[AbstractContextManager[MicroBatches]]:
        batches = RereadableBatches(window.batches) if self.rehearsals_left else window.batches
        yield from self.rehearse(window, batches)
        yield self.attempt(window, batches)

    def rehearse(self, window: Window, batches: Iterable[Batch]) -> Iterator[AbstractContextManager[MicroBatches]]:
        """Yield attempts whose gradients are discarded."""
        while self.rehearsals_left:
            self.rehearsals_left -= 1
            with unchanged_buffers(self.trainer.computing.model):
                yield self.attempt(window, batches)
            self.trainer.replica.zero_grad(set_to_none=True)

    def attempt(self, window: Window, batches: Iterable[Batch]) -> AbstractContextManager[MicroBatches]:
        return contextlib.nullcontext(cut(window, batches))
