"""Reading ahead: later tasks start before the result of a task is used, in threads and on the device."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from datasets.loading.readers import Reader
from datasets.order import Piece
from datasets.passes import read_ahead
from datasets.types import Batch
from utils.host import has_streams

MIN_IMAGES_PER_THREAD = 4


def read_in_threads(
    pieces: Iterable[Piece], reader: Reader, num_threads: int, device: torch.device, ahead: int
) -> Iterator[Batch]:
    """Yield the batches of the pieces in order, and prefetch `ahead` of them. Closing this generator ends the threads.

    All threads work on the same batch. Reading, decoding and resizing release the GIL.
    """
    # Each loader thread uses one torch thread, because idle torch threads would spin and take cores from training.
    # This call fixes the number of torch threads for the current thread; otherwise the loader threads would change it.
    torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, "loader", initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def start(piece: Piece):
            buffers = reader.allocate(piece, pinned=has_streams(device))
            count = len(piece.indices)
            share = max(MIN_IMAGES_PER_THREAD, math.ceil(count / num_threads))
            shares = [range(first, min(first + share, count)) for first in range(0, count, share)]
            return piece, buffers, [pool.submit(reader.fill, piece, each, buffers) for each in shares]

        try:
            for piece, buffers, shares in read_ahead(map(start, pieces), ahead):
                bad = [index for share in shares for index in share.result()]
                yield reader.batch(piece, buffers, bad)
        finally:
            pool.shutdown(cancel_futures=True)


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches on the device. A separate stream copies the next batch while the device computes."""
    stream = torch.Stream(device)

    def start_copy(batch: Batch) -> tuple[Batch, torch.Event]:
        with stream:
            images, targets = (each.to(device, non_blocking=True) for each in (batch.images, batch.targets))
        return batch._replace(images=images, targets=targets), stream.record_event()

    def hand_over(batch: Batch, copied: torch.Event) -> Batch:
        now = torch.accelerator.current_stream(device)
        now.wait_event(copied)  # makes the device wait, not the host
        for tensor in (batch.images, batch.targets):
            tensor.record_stream(now)  # otherwise the next copy could reuse the memory too early
        return batch

    with contextlib.closing(batches):
        ahead = None
        for batch in batches:
            started = start_copy(batch)
            if ahead:
                yield hand_over(*ahead)
            ahead = started
        if ahead:
            yield hand_over(*ahead)
