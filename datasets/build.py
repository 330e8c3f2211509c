"""Builds the batches of one process from image sets and settings, and their preparation on the device."""

from collections.abc import Callable

from configs.schema import Config
from datasets.image_set import ImageSet
from datasets.loading.readers import EvalData, EvalReader, TrainData, TrainReader
from datasets.loading.workers import choose_workers, make_loader
from datasets.order import Order
from datasets.transforms.crop import Normalize
from datasets.transforms.preparation import Preparation, SizedPreparation
from utils.distributed import Process
from utils.errors import ConfigError
from utils.text import counted, is_url

# The largest training set that overlap.py compares with the validation set. The comparison takes 16 MB per process, and
# delays the start by a second.
MOST_TRAINED = 2_000_000


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
    return TrainData(image_set, order, process.rank, load)


def build_eval_data(config: Config, image_set: ImageSet, process: Process) -> EvalData:
    """Return the evaluation data of one process."""
    batch_size = config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE
    load = _loader_of(config, image_set, process, batch_size, is_training=False)
    return EvalData(image_set, batch_size, process.rank, process.world_size, load, is_padded=config.COMPILE)


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
