"""Threads or processes that read ahead, and keep no state of their own: batches come in the order of their pieces."""

import atexit
import contextlib
import functools
import gc
import itertools
import math
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader

from configs.schema import Config, Data
from datasets.image_set import ImageSet
from datasets.order import Piece
from datasets.readers import Batch, Reader
from utils.errors import DataError

MOST_WORKERS = 8
BATCHES_AHEAD = 2  # of the one in use; threads all work on one batch after the other
SMALLEST_SHARE = 4  # images of a batch that are worth a thread's while


def read_in_threads(
    pieces: Iterable[Piece], reader: Reader, num_threads: int, device: torch.device, ahead: int = BATCHES_AHEAD
) -> Iterator[Batch]:
    """The batches of the pieces, in their order, and so many of them ahead. To close this generator ends the threads.

    Reading, decoding and resizing leave the interpreter to the other threads and to the training.
    """
    # Else each thread would have helpers of its own for torch's operations, which spin while they wait and so take the
    # cores from the training. The number is each thread's own, once it has one: this thread's is fixed by asking.
    torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, "loader", initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def start(piece: Piece):
            room = reader.room_for(piece, pinned=device.type == "cuda")
            count = len(piece.indices)
            share = max(SMALLEST_SHARE, math.ceil(count / num_threads))
            places = [range(first, min(first + share, count)) for first in range(0, count, share)]
            return piece, room, [pool.submit(reader.fill, piece, each, *room) for each in places]

        started = map(start, pieces)
        waiting = deque(itertools.islice(started, ahead))
        try:
            while True:
                waiting.extend(itertools.islice(started, 1))
                if not waiting:
                    return
                piece, room, shares = waiting.popleft()
                bad = [index for share in shares for index in share.result()]
                yield reader.batch(piece, *room, bad)
        finally:
            pool.shutdown(cancel_futures=True)


def read_in_processes(
    pieces: Iterable[Piece], reader: Reader, num_processes: int, device: torch.device, ahead: int = BATCHES_AHEAD
) -> Iterator[Batch]:
    """The same by worker processes; none: the process itself reads, when a batch is asked for."""
    # Forked where that is safe: started anew, each worker would first import torch, for seconds.
    context = "fork" if num_processes and sys.platform == "linux" else None
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=pieces,
        num_workers=num_processes,
        prefetch_factor=max(ahead, 1) if num_processes else None,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        multiprocessing_context=context,
        generator=torch.Generator(),  # the loader draws a seed, and must not take it from the run's generator
    )
    # What is there before the fork is left out when workers look for garbage, which would copy its pages to each of them.
    gc.freeze()
    with _signals_held_back():
        batches = iter(loader)  # here the workers start
    gc.unfreeze()
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    finally:
        del batches  # which ends the workers


def copied_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches on a CUDA device. A stream of its own copies the next one while the device computes on this one."""
    stream = torch.cuda.Stream(device)

    def start_copy(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            images, targets = (each.to(device, non_blocking=True) for each in (batch.images, batch.targets))
        return batch._replace(images=images, targets=targets), stream.record_event()

    def hand_over(batch: Batch, copied: torch.cuda.Event) -> Batch:
        now = torch.cuda.current_stream(device)
        now.wait_event(copied)  # the device waits, not the host
        for each in (batch.images, batch.targets):
            each.record_stream(now)  # else its memory could serve the next copy too early
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


def _as_it_is(batch: Batch) -> Batch:
    return batch


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes started in here never see these signals, the parent sees them a little later.

    Ctrl-C and Slurm's warnings reach every process of a run. The parent saves, for which it needs its workers, and then
    ends them itself.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@atexit.register
def _kill_workers() -> None:
    """At exit multiprocessing sends SIGTERM, which workers do not see, and waits: so nothing may be left to wait for."""
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call their end an error
    for worker in workers:
        worker.kill()


def count_workers(data: Data, image_set: ImageSet, world_size: int, device: torch.device) -> int:
    """Loader threads or processes of one training process: its share of the cores that this machine grants us."""
    if data.NUM_WORKERS is not None:
        return data.NUM_WORKERS
    if image_set.in_memory:
        return 0
    num_cores = cores_per_process(world_size, device)
    if device.type == "cpu" and (data.WORKERS == "processes" or batches_ahead(data, device)):
        num_cores = max(1, num_cores // 4)  # the others compute: even ViT-Tiny takes ten times as long as reading
    return min(MOST_WORKERS, num_cores)


def batches_ahead(data: Data, device: torch.device) -> int:
    """None where the CPU computes: its cores share out each operation, and wait for the one that has to read as well.

    A ViT-Tiny run is 6 to 14% faster when all of them read a batch and then all compute.
    """
    return data.PREFETCH if data.PREFETCH is not None else 0 if device.type == "cpu" else BATCHES_AHEAD


def cores_per_process(world_size: int, device: torch.device) -> int:
    """The cores that this machine grants us, shared out."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # With a GPU each, there are at most as many processes on this machine as GPUs; the others are elsewhere.
    num_local = min(world_size, torch.cuda.device_count()) if device.type == "cuda" else world_size
    return max(1, num_cores // num_local)


def batch_source(
    config: Config, reader: Reader, world_size: int, device: torch.device
) -> Callable[[Iterable[Piece]], Iterator[Batch]]:
    """How pieces become batches, for images that are read one by one."""
    num_workers = count_workers(config.DATA, reader.image_set, world_size, device)
    common = {"reader": reader, "device": device, "ahead": batches_ahead(config.DATA, device)}
    if num_workers and config.DATA.WORKERS == "threads":
        load = functools.partial(read_in_threads, num_threads=num_workers, **common)
    else:
        load = functools.partial(read_in_processes, num_processes=num_workers, **common)
    return (lambda pieces: copied_ahead(load(pieces), device)) if device.type == "cuda" else load
