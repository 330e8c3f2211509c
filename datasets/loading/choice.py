"""How many workers read the images of a process, of which kind, and how far ahead."""

import shutil
import sys
from typing import NamedTuple

from configs.schema import Config, Data
from datasets.types import ImageSet
from utils.distributed import Process
from utils.host import SHARED_MEMORY, free_host_memory

MAX_ON_CPU = 8
ENOUGH_CORES = 4  # from here on one is left to the training thread
AHEAD_OF_PROCESS = 2  # batches that each worker process reads in advance
MIN_AHEAD, MAX_AHEAD, BYTES_AHEAD = 2, 32, 2**30  # batches that all threads together read in advance; their bytes
MAX_FRACTION_AHEAD = 0.05  # of the free memory of the host, for all training processes together
MAX_FRACTION_SHARED = 0.8  # of the free shared memory
# Assumed fractions of its time for which a loader thread holds Python's lock (GIL); scripts/benchmarks/loader_lock.py
# measures them.
GIL_READING, GIL_AUGMENTING, GIL_IN_MEMORY = 0.12, 0.2, 0.6
MAX_GIL = 0.5  # of all of them together: the training thread needs the GIL for each operation that it starts


class Workers(NamedTuple):
    """The loader workers of one training process. 0: it reads each batch itself, when it needs it."""

    kind: str  # threads or processes
    count: int
    ahead: int  # batches in advance, beyond the one in use: of all threads together, of each process


def choose_workers(config: Config, image_set: ImageSet, process: Process) -> Workers:
    """The workers that the settings ask for; where they leave it open, as fits the device, the cores and the images."""
    data, on_cpu = config.DATA, process.device.type == "cpu"
    count, kind = data.NUM_WORKERS, data.WORKERS
    if count is None:
        count = _count_on_cpu(data, image_set, process) if on_cpu else cores_to_read(process)
    if kind == "auto":
        kind = "threads" if on_cpu else _kind_on_gpu(config, image_set, process, count)
    # On a CPU none: all cores share each operation, and would wait for one that loads. A ViT-Tiny run is 6 to 14%
    # faster when all cores load a batch and then all compute.
    ahead = 0 if on_cpu else AHEAD_OF_PROCESS if kind == "processes" else _ahead_of_threads(data, process)
    return Workers(kind, count, ahead)


def cores_to_read(process: Process) -> int:
    """How many cores can be used for reading: on a CPU all, since it reads and computes in turn."""
    leaves_one = process.device.type != "cpu" and process.num_cores >= ENOUGH_CORES
    return process.num_cores - leaves_one


def saturate_gil(num_threads: int, config: Config, image_set: ImageSet) -> bool:
    """Whether so many loader threads leave too little of the GIL to the training thread."""
    augments = config.DATA.AUGMENT_ON == "host" and config.TRAIN.augments
    decoding = GIL_AUGMENTING if augments else GIL_READING
    return num_threads * (GIL_IN_MEMORY if image_set.in_memory else decoding) > MAX_GIL


def shared_bytes(data: Data, num_processes: int) -> int:
    """Shared memory for the batches of so many loader processes. Those for training live on in evaluation."""
    num_images = data.BATCH_SIZE + (data.BATCH_SIZE_EVAL or data.BATCH_SIZE)
    return num_processes * AHEAD_OF_PROCESS * num_images * _image_bytes(data)


def _image_bytes(data: Data) -> int:
    return data.IMAGE_CHANNELS * data.IMAGE_SIZE**2


def _count_on_cpu(data: Data, image_set: ImageSet, process: Process) -> int:
    if image_set.in_memory:
        return 0
    if data.WORKERS == "processes":
        # The others compute: even ViT-Tiny takes ten times as long as loading.
        return min(MAX_ON_CPU, max(1, process.num_cores // 4))
    return min(MAX_ON_CPU, process.num_cores)


def _kind_on_gpu(config: Config, image_set: ImageSet, process: Process, count: int) -> str:
    """Threads, which cost less, unless they saturate the GIL and shared memory has room for what processes read."""
    if sys.platform != "linux" or image_set.is_read_in_groups or not saturate_gil(count, config, image_set):
        return "threads"
    needed = shared_bytes(config.DATA, count * process.local_size)
    has_room = SHARED_MEMORY.is_dir() and needed <= MAX_FRACTION_SHARED * shutil.disk_usage(SHARED_MEMORY).free
    return "processes" if has_room else "threads"


def _ahead_of_threads(data: Data, process: Process) -> int:
    """As many as memory allows: 16 batches of 256 bridge a file system that stands still for 0.8 s, at 5,000 images/s."""
    room = min(BYTES_AHEAD, MAX_FRACTION_AHEAD * free_host_memory() / process.local_size)
    pinned = 1 << (data.BATCH_SIZE * _image_bytes(data) - 1).bit_length()  # torch rounds up to a power of two
    return min(max(int(room / pinned), MIN_AHEAD), MAX_AHEAD)
