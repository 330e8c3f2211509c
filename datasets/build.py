"""Builds the batches of one process from image sets and settings, and their preparation on the device.

Loader workers, threads or processes, have no state and prefetch batches in order. choose_workers chooses their number.
"""

import functools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from configs.schema import Config
from datasets.image_set import ImageSet
from datasets.loading.readers import EvalData, EvalReader, Reader, TrainData, TrainReader
from datasets.order import Order, Piece
from datasets.pixels.kinds import pixels_of
from datasets.transforms.crop import Normalize
from datasets.transforms.preparation import Preparation, SizedPreparation
from datasets.types import Batch
from utils.distributed import Process
from utils.errors import ConfigError, DataError
from utils.host import SHARED_MEMORY, free_host_memory, has_streams
from utils.text import counted, is_url

# The largest training set that overlap.py compares with the validation set. The comparison takes 16 MB per process, and
# delays the start by a second.
MOST_TRAINED = 2_000_000
MAX_ON_CPU = 8  # loader workers of a run on a CPU
ENOUGH_CORES = 4  # with this many cores or more, one is reserved for the training thread
AHEAD_OF_PROCESS = 2  # batches that each worker process prefetches
MIN_AHEAD, MAX_AHEAD, BYTES_AHEAD = 2, 32, 2**30  # prefetched batches of all threads: minimum, maximum, maximum bytes
MAX_FRACTION_AHEAD = 0.05  # part of the host's free memory for the prefetched batches of all training processes
MAX_FRACTION_SHARED = 0.8  # part of the free shared memory that batches may fill
# Fractions of the time for which a loader thread is assumed to hold Python's GIL; measured in BENCHMARKS.md.
GIL_READING, GIL_AUGMENTING, GIL_IN_MEMORY = 0.12, 0.2, 0.6
MAX_GIL = 0.5  # limit for all loader threads together; the training thread needs the GIL to start each operation


def build_order(config: Config, image_set: ImageSet, world_size: int, fixed_global_batch: int | None = None) -> Order:
    """Return the order of the training images. `fixed_global_batch` replaces the settings' global batch."""
    data, train, epoch_order = config.DATA, config.TRAIN, image_set.epoch_order
    if data.SAMPLER == "balanced":
        from datasets.balance import order_of_balanced_epochs

        epoch_order = order_of_balanced_epochs(image_set)
    order = Order(
        num_images=len(image_set),
        batch_size=data.BATCH_SIZE,
        world_size=world_size,
        num_accumulated=train.ACCUM_ITER,
        drop_last=data.DROP_LAST,
        seed=config.SEED,
        epoch_order=epoch_order,
        is_balanced=data.SAMPLER == "balanced",
        num_repeats=train.REPEATED_AUG,
        in_pairs=train.mixes,
        fixed_global_batch=fixed_global_batch,
    )
    if order.num_repeats > order.global_batch:
        raise ConfigError(
            f"TRAIN.REPEATED_AUG is {order.num_repeats}, but an update has only {counted(order.global_batch, 'image')} "
            "(DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER); lower TRAIN.REPEATED_AUG or raise one of these"
        )
    return order


def class_weights(config: Config, image_set: ImageSet) -> list[float] | None:
    """Return TRAIN.CLASS_WEIGHTS for each output of the model, or None if it is not set."""
    if config.TRAIN.CLASS_WEIGHTS is None:
        return None
    from datasets.balance import read_class_weights

    return read_class_weights(config, image_set)


def _loader_of(config: Config, image_set: ImageSet, process: Process, batch_size: int, is_training: bool) -> Callable:
    """Return the function that makes batches from pieces of the order."""
    if image_set.makes_batches:
        return image_set.batches(config, batch_size, process.rank, process.device)
    reader = (TrainReader if is_training else EvalReader)(image_set, config)
    return make_loader(reader, choose_workers(config, image_set, process), process.device)


def invent_images(config: Config) -> ImageSet:
    """Return DATA.SYNTHETIC_SIZE images of invented pixels and targets, for trials."""
    from datasets.sources.synthetic import invent

    return invent(config)


def build_train_data(config: Config, image_set: ImageSet, process: Process, order: Order | None = None) -> TrainData:
    """Return the training data of one process in this order, or in the order of a new run if `order` is None."""
    order = order or build_order(config, image_set, process.world_size)
    load = _loader_of(config, image_set, process, order.batch_size, is_training=True)
    return TrainData(image_set, order, process, load)


def build_eval_data(config: Config, image_set: ImageSet, process: Process) -> EvalData:
    """Return the evaluation data of one process."""
    batch_size = config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE
    load = _loader_of(config, image_set, process, batch_size, is_training=False)
    return EvalData(image_set, batch_size, process, load, is_padded=config.COMPILE)


def build_preparation(config: Config, normalize: Normalize, is_compiled: bool = False) -> Preparation:
    """Return the preparation for these settings. If `is_compiled`, it has one compiled kernel per batch size."""
    return (SizedPreparation if config.TRAIN.SIZE_SCHEDULE else Preparation)(config, normalize, is_compiled)


def watches(train: ImageSet, val: ImageSet, path: str) -> bool:
    """Return whether a run looks for validation images that are also training images (overlap.py).

    A run does not compare training sets of more than MOST_TRAINED images, images in memory (which come from published
    data sets), or remote or streamed images (which cannot be read in arbitrary order).
    """
    is_of_files = not (train.storage.in_memory or train.makes_batches or val.storage.in_memory or is_url(path))
    return is_of_files and len(train) <= MOST_TRAINED


# --- loader workers ---


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
        # Loader processes get a quarter of the cores, and the others compute: computing takes ten times as long as
        # loading, even for ViT-Tiny.
        cores = max(1, process.num_cores // 4) if kind == "processes" else process.num_cores
        count = 0 if image_set.storage.in_memory else min(MAX_ON_CPU, cores)
    elif count is None:
        count = cores_to_read(process)
    if kind == "auto":
        kind = "threads" if on_cpu else _kind_on_gpu(config, image_set, process, count)
    # On a CPU threads read no batch ahead, because all cores share each operation and would wait for a core that loads.
    # A ViT-Tiny run is 6 to 14% faster when all cores load a batch and then all compute.
    if on_cpu:
        return Workers(kind, count, ahead=0)
    return Workers(kind, count, AHEAD_OF_PROCESS if kind == "processes" else _ahead_of_threads(config, process))


def cores_to_read(process: Process) -> int:
    """Return the number of cores for reading. A CPU run uses all cores, because it reads and computes in turn."""
    leaves_one = process.device.type != "cpu" and process.num_cores >= ENOUGH_CORES
    return process.num_cores - leaves_one


def shared_bytes(config: Config, num_processes: int) -> int:
    """Return the bytes of shared memory that the batches of this number of loader processes need.

    Training batches stay in memory during evaluation, so both kinds of batches need memory.
    """
    num_images = config.DATA.BATCH_SIZE + (config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE)
    return num_processes * AHEAD_OF_PROCESS * num_images * image_bytes(config)


def image_bytes(config: Config) -> int:
    """Return the bytes of the largest image in a batch."""
    data = config.DATA
    return data.IMAGE_CHANNELS * data.shape.height * data.shape.width * pixels_of(data).dtype_in_batch.itemsize


def _kind_on_gpu(config: Config, image_set: ImageSet, process: Process, count: int) -> str:
    """Return "threads", which cost less, unless they saturate the GIL and shared memory is enough for processes."""
    decoding = GIL_AUGMENTING if config.TRAIN.augments else GIL_READING
    is_saturated = count * (GIL_IN_MEMORY if image_set.storage.in_memory else decoding) > MAX_GIL
    if sys.platform != "linux" or image_set.storage.is_read_in_groups or not is_saturated:
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
    pinned = 1 << (config.DATA.BATCH_SIZE * image_bytes(config) - 1).bit_length()
    return min(max(int(room / pinned), MIN_AHEAD), MAX_AHEAD)


def read_here(pieces: Iterable[Piece], reader: Reader) -> Iterator[Batch]:
    """Yield the batch of each piece, which this process reads when it is requested."""
    for piece in pieces:
        batch = reader[piece]
        if isinstance(batch, DataError):
            raise batch
        yield batch


def make_loader(reader: Reader, workers: Workers, device: torch.device) -> Callable[[Iterable[Piece]], Iterator[Batch]]:
    """Return a function that turns pieces into batches, for images that are read one by one."""
    common = {"reader": reader, "device": device, "ahead": workers.ahead}
    if workers.count and workers.kind == "threads":
        from datasets.loading.ahead import read_in_threads

        load = functools.partial(read_in_threads, num_threads=workers.count, **common)
    elif workers.count or has_streams(device):
        from datasets.loading.processes import read_in_processes

        load = functools.partial(read_in_processes, num_processes=workers.count, **common)
    else:
        load = functools.partial(read_here, reader=reader)
    if not has_streams(device):
        return load
    from datasets.loading.ahead import prefetch_to_device

    def load_ahead(pieces: Iterable[Piece]) -> Iterator[Batch]:
        return prefetch_to_device(load(pieces), device)

    return load_ahead
