"""Loader processes, which read batches ahead into shared memory."""

import atexit
import contextlib
import gc
import multiprocessing
import secrets
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import connection

import torch
from torch.utils.data import DataLoader, get_worker_info

from datasets.loading.readers import Reader
from datasets.order import Piece
from datasets.types import Batch
from utils.errors import DataError, LostProcess
from utils.host import has_streams
from utils.program import STOPPING, die_with_parent

SECONDS_TO_DIE = 1.0  # the longest time between the first error that a dying worker causes and the worker's end
REMEDY = "lower DATA.NUM_WORKERS, or set DATA.WORKERS=threads, which needs no shared memory"


def read_in_processes(
    pieces: Iterable[Piece], reader: Reader, num_processes: int, device: torch.device, ahead: int
) -> Iterator[Batch]:
    """Yield batches like read_in_threads, from worker processes.

    Without workers, this process reads each batch itself.
    """
    # Fork where it is safe, because a spawned worker would spend seconds importing torch.
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
        generator=torch.Generator(),  # for the loader's seed, so that the run's generator does not change
        worker_init_fn=_prepare_worker,
    )
    others = multiprocessing.active_children()
    try:
        with _workers_without_signals():
            batches = iter(loader)  # starts the workers
    except OSError as error:  # the workers' locks need shared memory too
        raise DataError(f"DATA.WORKERS: loader processes cannot be started ({error}); {REMEDY}") from error
    workers = [each for each in multiprocessing.active_children() if each not in others]
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (RuntimeError, OSError, EOFError) as error:  # a dead worker causes various errors
        if not workers or not connection.wait([each.sentinel for each in workers], SECONDS_TO_DIE):
            raise
        dead = next(each for each in workers if not each.is_alive())
        raise LostProcess(
            f"loader process {dead.pid} ended with exit code {dead.exitcode}; if memory ran out, {REMEDY}. "
            "-resume auto continues from the last checkpoint"
        ) from error
    finally:
        del batches  # ends the workers


def _abstract_address(family: str) -> str:
    return f"\0halfstep-{secrets.token_hex(16)}"


def _prepare_worker(number: int) -> None:
    """End a worker together with the run.

    Otherwise torch's workers would live for up to 5 s and lock the run folder.
    """
    die_with_parent()
    gc.freeze()  # a garbage collection would touch the objects from before the fork, and so copy their pages
    if sys.platform == "linux":  # an abstract socket leaves no folder behind if the process is killed
        connection.arbitrary_address = _abstract_address


def _into_shared_memory(batch: Batch | DataError) -> Batch | DataError:
    """Move a worker's batch to shared memory, through which it is sent.

    torch would do that in a thread of the worker. When shared memory is full, that thread only prints an error, and the
    run would wait for the batch forever.
    """
    if get_worker_info() is None or isinstance(batch, DataError):
        return batch
    try:
        for tensor in (batch.images, batch.targets):
            if len(tensor):
                tensor.share_memory_()
    except RuntimeError as error:
        return DataError(
            f"DATA.WORKERS: shared memory is too small for a batch ({error}); enlarge /dev/shm (docker run --shm-size) "
            f"or {REMEDY}"
        )
    return batch


@contextlib.contextmanager
def _workers_without_signals() -> Iterator[None]:
    """Block the STOPPING signals in processes that the `with` block starts, and keep the SIGCHLD handler.

    Ctrl-C, Slurm's warnings and a closed terminal reach every process of a run. The parent needs its workers while it
    saves, and then ends them itself. It gets its own signals a little later. torch's handler of SIGCHLD would raise an
    error if a worker dies, even during a save.
    """
    blocked, handler = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING), signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@atexit.register
def _kill_workers() -> None:
    """Kill the workers at exit. multiprocessing would send SIGTERM, which workers block, and wait for them forever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
