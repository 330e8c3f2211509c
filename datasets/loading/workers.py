"""Threads or processes that read ahead without state of their own: batches come in the order of their pieces."""

import atexit
import contextlib
import functools
import gc
import itertools
import math
import multiprocessing
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import DataLoader, get_worker_info

from datasets.batch_order import Piece
from datasets.loading.choice import Workers
from datasets.loading.readers import Batch, Reader
from datasets.loading.to_device import prefetch_to_device
from utils.errors import DataError, LostProcess
from utils.host import has_streams
from utils.signals import die_with_parent

MIN_IMAGES_PER_THREAD = 4
SECONDS_TO_DIE = 1.0  # between the first error that a dying worker causes and its end
REMEDY = "lower DATA.NUM_WORKERS, or set DATA.WORKERS=threads, which need no shared memory"


def read_in_threads(
    pieces: Iterable[Piece], reader: Reader, num_threads: int, device: torch.device, ahead: int
) -> Iterator[Batch]:
    """The batches of the pieces in their order, `ahead` of them in advance. Closing this generator ends the threads.

    All threads work on the same batch. Reading, decoding and resizing release Python's lock.
    """
    # Each loader thread uses one torch thread: more would spin while they wait, and take the cores from the training.
    # Reading the number here fixes this thread's own, which the loader threads would otherwise change.
    torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, "loader", initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def start(piece: Piece):
            buffers = reader.allocate(piece, pinned=has_streams(device))
            count = len(piece.indices)
            share = max(MIN_IMAGES_PER_THREAD, math.ceil(count / num_threads))
            shares = [range(first, min(first + share, count)) for first in range(0, count, share)]
            return piece, buffers, [pool.submit(reader.fill, piece, each, buffers) for each in shares]

        started = map(start, pieces)
        waiting = deque(itertools.islice(started, ahead))
        try:
            while True:
                waiting.extend(itertools.islice(started, 1))
                if not waiting:
                    return
                piece, buffers, shares = waiting.popleft()
                bad = [index for share in shares for index in share.result()]
                yield reader.batch(piece, buffers, bad)
        finally:
            pool.shutdown(cancel_futures=True)


def read_in_processes(
    pieces: Iterable[Piece], reader: Reader, num_processes: int, device: torch.device, ahead: int
) -> Iterator[Batch]:
    """As read_in_threads, with worker processes. Without any, this process reads each batch when it is requested."""
    # Fork where that is safe: a spawned worker would first import torch, for seconds.
    context = "fork" if num_processes and sys.platform == "linux" else None
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=pieces,
        num_workers=num_processes,
        prefetch_factor=max(ahead, 1) if num_processes else None,
        collate_fn=_into_shared_memory,
        pin_memory=has_streams(device),
        multiprocessing_context=context,
        generator=torch.Generator(),  # the loader draws a seed, which must not come from the run's generator
        worker_init_fn=_end_with_run,
    )
    # Workers' garbage collection must not touch objects from before the fork, which would copy their pages. Without
    # workers what utils/program.py has frozen stays so.
    if num_processes:
        gc.freeze()
    others = multiprocessing.active_children()
    try:
        with _blocked_signals(), _preserved_sigchld_handler():
            batches = iter(loader)  # starts the workers
    except OSError as error:  # their locks need shared memory too
        raise DataError(f"DATA.WORKERS: loader processes cannot be started ({error}); {REMEDY}") from error
    finally:
        if num_processes:
            gc.unfreeze()
    workers = [each for each in multiprocessing.active_children() if each not in others]
    try:
        while (batch := _next(batches, workers)) is not None:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    finally:
        del batches  # which ends the workers


def _end_with_run(number: int) -> None:
    """After kill -9 of the run torch's workers would live on for up to 5 s, and with them the lock of its folder."""
    die_with_parent()


def _next(batches: Iterator[Batch | DataError], workers: list[BaseProcess]) -> Batch | DataError | None:
    """The next batch, None after the last; LostProcess if any worker has died."""
    try:
        batch = next(batches, None)
    except (RuntimeError, OSError, EOFError):  # a dead worker shows in many ways
        _raise_if_dead(workers, SECONDS_TO_DIE)
        raise
    if batch is not None:
        _raise_if_dead(workers, 0.0)
    return batch


def _raise_if_dead(workers: list[BaseProcess], seconds: float) -> None:
    if not (workers and wait([each.sentinel for each in workers], seconds)):
        return
    dead = next(each for each in workers if wait([each.sentinel], 0.0))
    dead.join()
    for each in workers:  # one that waits for a lock of the dead one would never end
        each.kill()
    how = (
        f"with exit code {dead.exitcode}" if dead.exitcode >= 0 else f"by signal {signal.Signals(-dead.exitcode).name}"
    )
    raise LostProcess(
        f"loader process {dead.pid} ended {how}; if memory ran out, {REMEDY}. "
        "-resume auto continues from the last checkpoint"
    )


def _into_shared_memory(batch: Batch | DataError) -> Batch | DataError:
    """Move a worker's batch to shared memory, through which it is sent.

    torch would do that in a thread of the worker which, without room, only prints an error: the run would wait for the
    batch for ever.
    """
    if get_worker_info() is None or isinstance(batch, DataError):
        return batch
    try:
        for each in (batch.images, batch.targets):
            if len(each):
                each.share_memory_()
    except RuntimeError as error:
        return DataError(
            f"DATA.WORKERS: no room in shared memory for a batch ({error}); enlarge /dev/shm (docker run --shm-size) "
            f"or {REMEDY}"
        )
    return batch


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block these signals in the processes started in here; the parent gets them a little later.

    Ctrl-C and Slurm's warnings reach every process of a run. The parent saves, for which it needs its workers, and then
    ends them itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _preserved_sigchld_handler() -> Iterator[None]:
    """Undo torch's handler, which raises the death of a worker wherever the training is, inside a save for example."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@atexit.register
def _kill_workers() -> None:
    """At exit multiprocessing sends SIGTERM, which workers block, and would wait for them for ever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def make_loader(reader: Reader, workers: Workers, device: torch.device) -> Callable[[Iterable[Piece]], Iterator[Batch]]:
    """The function from pieces to batches, for images that are read one by one."""
    common = {"reader": reader, "device": device, "ahead": workers.ahead}
    if workers.count and workers.kind == "threads":
        load = functools.partial(read_in_threads, num_threads=workers.count, **common)
    else:
        load = functools.partial(read_in_processes, num_processes=workers.count, **common)
    return (lambda pieces: prefetch_to_device(load(pieces), device)) if has_streams(device) else load
