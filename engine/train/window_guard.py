"""How a window is cut into micro-batches, and what happens when one of them cannot be computed."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from datasets import Batch, Window

MicroBatches = Iterator[tuple[Batch, bool]]  # each with whether it is this process's last of the window


class WindowGuard:
    """Each batch of the loader is a micro-batch, and nothing is tried twice.

    A subclass may yield further attempts: the trainer starts the window again in each.
    """

    def attempts(self, window: Window) -> Iterator[AbstractContextManager[MicroBatches]]:
        yield contextlib.nullcontext(cut(window, window.batches))


def cut(window: Window, batches: Iterable[Batch], max_images: int | None = None) -> MicroBatches:
    """Micro-batches of at most `max_images` images; None: as they come."""
    for number, batch in enumerate(batches, start=1):
        parts = [batch] if max_images is None else batch.parts(max_images)
        for part in parts:
            yield part, number == window.num_batches and part is parts[-1]
