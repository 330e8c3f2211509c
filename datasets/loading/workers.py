"""Threads or processes that read ahead, and keep no state of their own: batches come in the order of their pieces."""

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

from configs.schema import Config, Data
from datasets.batch_order import Piece
from datasets.loading.readers import Batch, Reader
from datasets.types import ImageSet
from utils.errors import DataError, LostProcess
from utils.host import cores_per_process

MOST_WORKERS = 8
BATCHES_AHEAD = 2  # of the one in use; threads all work on one batch after the other
SMALLEST_SHARE = 4  # images of a batch that are worth a thread's while
SECONDS_TO_DIE = 1.0  # from what a dying worker breaks to its end
LESS = "lower DATA.NUM_WORKERS, or set DATA.WORKERS=threads, which need no shared memory"


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
        collate_fn=_into_shared_memory,
        pin_memory=device.type == "cuda",
        multiprocessing_context=context,
        generator=torch.Generator(),  # the loader draws a seed, and must not take it from the run's generator
    )
    # What is there before the fork is left out when workers look for garbage, which would copy its pages to each of them.
    gc.freeze()
    others = multiprocessing.active_children()
    try:
        with _signals_held_back(), _handler_kept():
            batches = iter(loader)  # here the workers start
    except OSError as error:  # their locks lie in shared memory too
        raise DataError(f"DATA.WORKERS: loader processes cannot be started ({error}); {LESS}") from error
    finally:
        gc.unfreeze()
    workers = [each for each in multiprocessing.active_children() if each not in others]
    try:
        while (batch := _next(batches, workers)) is not None:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    finally:
        del batches  # which ends the workers


def _next(batches: Iterator[Batch | DataError], workers: list[BaseProcess]) -> Batch | DataError | None:
    """The next batch, None behind the last; LostProcess where a worker has died, whether or not it owes this batch."""
    try:
        batch = next(batches, None)
    except (RuntimeError, OSError, EOFError):  # a dead worker shows in many ways
        _look_for_dead(workers, SECONDS_TO_DIE)
        raise
    if batch is not None:
        _look_for_dead(workers, 0.0)
    return batch


def _look_for_dead(workers: list[BaseProcess], seconds: float) -> None:
    if not (workers and wait([each.sentinel for each in workers], seconds)):
        return
    dead = next(each for each in workers if wait([each.sentinel], 0.0))
    dead.join()
    for each in workers:  # one that waits for what the dead one held would do so for ever
        each.kill()
    how = (
        f"with exit code {dead.exitcode}" if dead.exitcode >= 0 else f"by signal {signal.Signals(-dead.exitcode).name}"
    )
    raise LostProcess(
        f"loader process {dead.pid} ended {how}; if memory ran out, {LESS}. -resume auto goes on from the last save"
    )


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


def _into_shared_memory(batch: Batch | DataError) -> Batch | DataError:
    """In a worker process, what the batch is sent through.

    Left to torch, this is done by a thread of the worker's, which would only print that there is no room: the run would
    wait for the batch for ever.
    """
    if get_worker_info() is None or isinstance(batch, DataError):
        return batch
    try:
        for each in (batch.images, batch.targets):
            if len(each):
                each.share_memory_()
    except RuntimeError as error:
        return DataError(
            f"DATA.WORKERS: no room in shared memory for a batch ({error}); enlarge /dev/shm (docker run --shm-size), {LESS}"
        )
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


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
    """Without torch's handler, which raises the end of a worker in whatever the training does then, a save for example."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@atexit.register
def _kill_workers() -> None:
    """At exit multiprocessing sends SIGTERM, which workers do not see, and waits: so nothing may be left to wait for."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


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
