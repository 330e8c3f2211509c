"""Loader threads of the training process, which prefetch batches."""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from datasets.loading.readers import Reader
from datasets.order import Piece
from datasets.types import Batch
from utils.host import has_streams
from utils.read_ahead import read_ahead

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
