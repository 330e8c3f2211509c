"""The micro-batches of an update, and the guard, which may repeat the update with smaller micro-batches."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from datasets import Batch, Window

MicroBatches = Iterator[tuple[Batch, bool]]  # bool: whether it is the last micro-batch of this process in the window


class Guard:
    """The default guard: each batch of the loader is a micro-batch, and there is one attempt.

    A subclass may yield further attempts. The trainer computes the whole window again in each of them.
    """

    def attempts(self, window: Window) -> Iterator[AbstractContextManager[MicroBatches]]:
        yield contextlib.nullcontext(cut(window, window.batches))


def cut(window: Window, batches: Iterable[Batch], max_images: int | None = None) -> MicroBatches:
    """Yield micro-batches of at most `max_images` images, or the loader's own batches if `max_images` is None."""
    for number, batch in enumerate(batches, start=1):
        parts = [batch] if max_images is None else batch.parts(max_images)
        for part in parts:
            yield part, number == window.num_batches and part is parts[-1]
