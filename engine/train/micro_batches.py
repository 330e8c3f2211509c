"""The micro-batches of an update, and the guard that may repeat it with smaller ones."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from datasets import Batch, Window

MicroBatches = Iterator[tuple[Batch, bool]]  # each with whether it is the last one of this process in the window


class Guard:
    """Every batch of the loader is a micro-batch, and nothing is repeated.

    A subclass may yield further attempts: the trainer restarts the window for each.
    """

    def attempts(self, window: Window) -> Iterator[AbstractContextManager[MicroBatches]]:
        yield contextlib.nullcontext(cut(window, window.batches))


def cut(window: Window, batches: Iterable[Batch], max_images: int | None = None) -> MicroBatches:
    """Micro-batches of at most `max_images` images; None: as the loader delivers them."""
    for number, batch in enumerate(batches, start=1):
        parts = [batch] if max_images is None else batch.parts(max_images)
        for part in parts:
            yield part, number == window.num_batches and part is parts[-1]
