"""Stateless loader workers, threads or processes, that prefetch batches in order, and the choice of their number."""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from configs.schema import Config
from datasets.batching import batching_of
from datasets.loading.readers import Reader
from datasets.order import Piece
from datasets.types import Batch, ImageSet
from utils.distributed import Process
from utils.errors import DataError, LostProcess
from utils.host import SHARED_MEMORY, free_host_memory, has_streams
from utils.program import STOPPING, die_with_parent

MAX_ON_CPU = 8  # loader workers of a run on a CPU
ENOUGH_CORES = 4  # with this many cores or more, one is reserved for the training thread
AHEAD_OF_PROCESS = 2  # batches that each worker process prefetches
MIN_AHEAD, MAX_AHEAD, BYTES_AHEAD = 2, 32, 2**30  # prefetched batches of all threads: minimum, maximum, maximum bytes
MAX_FRACTION_AHEAD = 0.05  # part of the host's free memory for the prefetched batches of all training processes
MAX_FRACTION_SHARED = 0.8  # part of the free shared memory that batches may fill
# Fractions of the time for which a loader thread is assumed to hold Python's GIL; measured in BENCHMARKS.md.
GIL_READING, GIL_AUGMENTING, GIL_IN_MEMORY = 0.12, 0.2, 0.6
MAX_GIL = 0.5  # limit for all loader threads together; the training thread needs the GIL to start each operation


class Workers(NamedTuple):
    """The loader workers of one training process. With 0 workers, the process reads each batch itself when needed."""

    kind: str  # threads or processes
    count: int
    # Prefetched batches in addition to the batch in use: of all threads together, or of each process.
    ahead: int


def choose_workers(config: Config, image_set: ImageSet, process: Process) -> Workers:
    """Return the workers that the settings specify, or choose them by device, cores and images."""
    data, on_cpu = config.DATA, process.device.type == "cpu"
    count, kind = data.NUM_WORKERS, data.WORKERS
    if count is None and on_cpu:
        # Beside loader processes the other cores compute: even ViT-Tiny computes for ten times as long as loading takes.
        cores = max(1, process.num_cores // 4) if kind == "processes" else process.num_cores
        count = 0 if image_set.in_memory else min(MAX_ON_CPU, cores)
    elif count is None:
        count = cores_to_read(process)
    if kind == "auto":
        kind = "threads" if on_cpu else _kind_on_gpu(config, image_set, process, count)
    # On a CPU threads read no batch ahead, because all cores share each operation and would wait for a core that loads.
    # A ViT-Tiny run is 6 to 14% faster when all cores load a batch and then all compute.
    ahead = 0 if on_cpu else AHEAD_OF_PROCESS if kind == "processes" else _ahead_of_threads(config, process)
    return Workers(kind, count, ahead)


def cores_to_read(process: Process) -> int:
    """Return the number of cores for reading. A CPU run uses all cores, because it reads and computes in turn."""
    leaves_one = process.device.type != "cpu" and process.num_cores >= ENOUGH_CORES
    return process.num_cores - leaves_one


def shared_bytes(config: Config, num_processes: int) -> int:
    """Return the bytes of shared memory that the batches of this number of loader processes need.

    Training batches stay in memory during evaluation, so both kinds of batches need memory.
    """
    num_images = config.DATA.BATCH_SIZE + (config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE)
    return num_processes * AHEAD_OF_PROCESS * num_images * batching_of(config.DATA).image_bytes(config)


def _kind_on_gpu(config: Config, image_set: ImageSet, process: Process, count: int) -> str:
    """Return "threads", which cost less, unless they saturate the GIL and shared memory is enough for processes."""
    decoding = GIL_AUGMENTING if config.TRAIN.augments else GIL_READING
    is_saturated = count * (GIL_IN_MEMORY if image_set.in_memory else decoding) > MAX_GIL
    if sys.platform != "linux" or image_set.is_read_in_groups or not is_saturated:
        return "threads"
    needed = shared_bytes(config, count * process.local_size)
    has_room = SHARED_MEMORY.is_dir() and needed <= MAX_FRACTION_SHARED * shutil.disk_usage(SHARED_MEMORY).free
    return "processes" if has_room else "threads"


def _ahead_of_threads(config: Config, process: Process) -> int:
    """Return the number of batches that all threads together prefetch, as far as memory allows.

    16 batches of 256 images bridge a file-system stall of 0.8 s at 5,000 images/s.
    """
    room = min(BYTES_AHEAD, MAX_FRACTION_AHEAD * free_host_memory() / process.local_size)
    # torch rounds each allocation of pinned memory up to a power of two.
    pinned = 1 << (config.DATA.BATCH_SIZE * batching_of(config.DATA).image_bytes(config) - 1).bit_length()
    return min(max(int(room / pinned), MIN_AHEAD), MAX_AHEAD)


SECONDS_TO_DIE = 1.0  # the longest time between the first error that a dying worker causes and the worker's end
REMEDY = "lower DATA.NUM_WORKERS, or set DATA.WORKERS=threads, which needs no shared memory"


def read_in_processes(
    pieces: Iterable[Piece], reader: Reader, num_processes: int, device: torch.device, ahead: int
) -> Iterator[Batch]:
    """Yield batches like read_in_threads, from worker processes.

    Without workers, this process reads each batch when it is requested.
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


def _prepare_worker(number: int) -> None:
    """End a worker together with the run. Otherwise torch's workers would live for up to 5 s and lock the run folder."""
    die_with_parent()
    gc.freeze()  # a garbage collection would touch the objects from before the fork, and so copy their pages
    if sys.platform == "linux":  # an abstract socket leaves no folder behind if the process is killed
        connection.arbitrary_address = lambda family: f"\0halfstep-{secrets.token_hex(16)}"


def _into_shared_memory(batch: Batch | DataError) -> Batch | DataError:
    """Move a worker's batch to shared memory, through which it is sent.

    torch would do that in a thread of the worker. When shared memory is full, that thread only prints an error, and the
    run would wait for the batch forever.
    """
    if get_worker_info() is None or isinstance(batch, DataError):
        return batch
    try:
        for each in (batch.images, batch.targets):
            if len(each):
                each.share_memory_()
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


def make_loader(reader: Reader, workers: Workers, device: torch.device) -> Callable[[Iterable[Piece]], Iterator[Batch]]:
    """Return a function that turns pieces into batches, for images that are read one by one."""
    common = {"reader": reader, "device": device, "ahead": workers.ahead}
    if workers.count and workers.kind == "threads":
        from datasets.loading.ahead import read_in_threads

        load = functools.partial(read_in_threads, num_threads=workers.count, **common)
    else:
        load = functools.partial(read_in_processes, num_processes=workers.count, **common)
    if not has_streams(device):
        return load
    from datasets.loading.ahead import prefetch_to_device

    return lambda pieces: prefetch_to_device(load(pieces), device)
