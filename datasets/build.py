"""Builds image sets from the settings, and from them the batches of one process and their preparation on the device."""

from collections.abc import Callable

import numpy as np
import torch

from configs.schema import Config, Data
from datasets.batching import batching_of
from datasets.classes import number_classes, without_new_classes
from datasets.loading.readers import EvalData, TrainData
from datasets.loading.workers import choose_workers, make_loader
from datasets.order import Order
from datasets.sources import find_source
from datasets.split import describe_split, split
from datasets.split.parts import warn_of_lacking_classes
from datasets.transforms.crop import Normalize
from datasets.transforms.preparation import Preparation
from datasets.types import ImageSet, SavedData
from utils.distributed import Process
from utils.errors import ConfigError, DataError, did_you_mean
from utils.text import counted, is_url

NUM_SMALLEST = 3  # the number of smallest classes that the log names
# The largest training set that overlap.py compares with the validation set. The comparison takes 16 MB per process, and
# delays the start by a second.
MOST_TRAINED = 2_000_000


def load_image_sets(
    config: Config, say: Callable[[str], None] = print, saved: SavedData | None = None, output: str | None = None
) -> tuple[ImageSet | None, ImageSet]:
    """Return the checked training set (None with EVAL) and validation set of DATA.DATASET. `say` reports a download.

    `saved`: the data record of the resumed or evaluated checkpoint; both sets get its class numbers.
    `output`: the folder that the run writes to.
    """
    data = config.DATA
    try:
        train, val = find_source(data.DATASET, data.DATA_PATH)(config, say)
    except OSError as error:
        raise DataError(f"DATA.DATA_PATH: {data.DATA_PATH} cannot be read ({error})") from error
    whole = train if val is None else val
    if whole.is_listing:
        from datasets.sources.folder import refuse_doubtful, refuse_output_inside

        refuse_doubtful(config, saved, whole)
        if output:
            refuse_output_inside(filter(None, (train, val)), output)
    if val is None:
        train, val = _split(config, train, saved)
    elif not config.START.EVAL:
        _check_own_parts(config, train, val)
    if config.START.EVAL:
        train, val = None, val if data.CLASSES else without_new_classes(val, saved)
    parts = {part: each for part, each in (("training", train), ("validation", val)) if each is not None}
    for part, image_set in parts.items():
        if not len(image_set):
            from datasets.split.empty import empty_part_error

            raise empty_part_error(config, part, whole)
    numbered, notes = _look_into_files(data, *number_classes(config, list(parts.values()), saved))
    train, val = (None if train is None else numbered[0]), numbered[-1]
    _refuse_one_class(config, train, val)
    for image_set in numbered:
        _check_num_classes(config, image_set)
    counts = _describe_class_counts(train, val) if config.task.noun == "class" else ()
    notes = (*describe_split(config, val), *counts, *notes, *val.notes)
    return train, val.with_facts(notes=notes)


def _split(config: Config, whole: ImageSet, saved: SavedData | None) -> tuple[ImageSet | None, ImageSet]:
    if config.START.EVAL:
        from datasets.split.trained_on import split_to_evaluate

        return split_to_evaluate(config, whole, saved)
    return split(config, whole, saved)


def _look_into_files(data: Data, sets: list[ImageSet], notes: tuple) -> tuple[list[ImageSet], tuple]:
    """Return the sets and notes after a look into a few files, to find the type of their values."""
    if sets[0].in_memory or sets[0].makes_batches:
        return sets, notes
    pixels, found = sets[0].pixels.look_into(sets[0], is_url(data.DATA_PATH))
    return [each.with_facts(pixels=pixels) for each in sets], (*notes, *found)


def _check_own_parts(config: Config, train: ImageSet, val: ImageSet) -> None:
    """Refuse DATA.FOLD for data with its own validation images, and classes that only validation images have."""
    if config.DATA.FOLD:
        raise ConfigError(
            f"DATA.FOLD is {config.DATA.FOLD}, but {config.DATA.DATASET} has its own validation images "
            f"({val.split['validation']}); leave DATA.FOLD out, or set -data_path to the folder or file of one part to "
            "divide only that part"
        )
    trained = train.count_classes() > 0
    unknown = np.flatnonzero((val.count_classes() > 0) & ~trained)
    if len(unknown) and val.split["rule"] == "folders":
        name, known = val.classes[unknown[0]], [train.classes[number] for number in np.flatnonzero(trained)]
        first = int(val.with_any(unknown[:1]).argmax())
        raise DataError(
            f"{val.name(first)}: class {name} does not occur in the training images, so it would never be trained; "
            f"correct the label, or add training images{did_you_mean(name, known)}"
        )


def _describe_class_counts(train: ImageSet | None, val: ImageSet) -> list[str]:
    """Describe the classes with the fewest images: the model learns them worst, and their accuracy is least certain.

    Warn of classes that only one part has, unless halfstep has split the data: the split gives this warning itself.
    """
    if train is None or val.makes_batches or len(val.classes) == 1:
        return []
    counts = train.count_classes(), val.count_classes()
    smallest = sorted(np.flatnonzero(total := sum(counts)).tolist(), key=lambda number: total[number])[:NUM_SMALLEST]
    found = (f"{val.classes[each]} ({counts[0][each]:,}/{counts[1][each]:,})" for each in smallest)
    warning = warn_of_lacking_classes(val.classes, *counts) if val.split["rule"] == "folders" else []
    return [f"smallest classes (train/val): {', '.join(found)}", *warning]


def _refuse_one_class(config: Config, train: ImageSet | None, val: ImageSet) -> None:
    """Raise DataError if all training images have the same class, or, in an evaluation, if only one class is known."""
    if val.makes_batches or not config.task.has_classes:
        return
    name = val.target_names()[int(val.targets[0])]
    is_one = len(val.classes) == 1 and not val.labels_are_numbers and val.meaning.has_one_class
    if is_one if train is None else train.targets.min() == train.targets.max():
        raise DataError(
            f"DATA.DATA_PATH: all images in {config.DATA.DATA_PATH} have the same class, {name!r}, so there is nothing "
            "to learn; -data_path must name the folder that has a folder for each class, or a list of several classes"
        )


def _check_num_classes(config: Config, image_set: ImageSet) -> None:
    num_classes, names = config.MODEL.NUM_CLASSES, image_set.classes
    if num_classes is None or num_classes >= len(names):
        return
    if (too_high := image_set.with_any(np.arange(num_classes, len(names)))).any():
        first = int(too_high.argmax())
        number = max(image_set.meaning.classes_of(int(image_set.targets[first])))
        raise DataError(
            f"{image_set.name(first)}: its class {names[number]!r} has number {number} (from 0), but "
            f"MODEL.NUM_CLASSES is {num_classes}; set -num_classes {len(names)} or leave it out"
        )


def build_order(config: Config, image_set: ImageSet, world_size: int, resumed_global_batch: int | None = None) -> Order:
    """Return the order of the training images. `resumed_global_batch` replaces the settings' global batch."""
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
        resumed_global_batch=resumed_global_batch,
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
        return generate_batches(config, image_set, batch_size, process)
    reader = batching_of(config.DATA).reader(config, image_set, is_training)
    return make_loader(reader, choose_workers(config, image_set, process), process.device)


def generate_batches(config: Config, image_set: ImageSet, batch_size: int, process: Process) -> Callable:
    """Return the function that makes batches of random images on the device from pieces of the order."""
    return batching_of(config.DATA).invent(config, image_set, batch_size, process)


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


def build_normalize(data: Data, dtype: torch.dtype = torch.float32) -> Normalize:
    """Return the normalization of the images of a batch. See Normalize for `dtype`."""
    return batching_of(data).normalize(data, dtype)


def build_preparation(config: Config, normalize: Normalize, is_compiled: bool = False) -> Preparation:
    """Return the preparation for these settings. If `is_compiled`, it has one compiled kernel per batch size."""
    return batching_of(config.DATA).preparation(config, normalize, is_compiled)


def watches(train: ImageSet, val: ImageSet, path: str) -> bool:
    """Return whether a run looks for validation images that are also training images (overlap.py).

    A run does not compare training sets of more than MOST_TRAINED images, images in memory (which come from published
    data sets), or remote or streamed images (which cannot be read in arbitrary order).
    """
    is_of_files = not (train.in_memory or train.makes_batches or val.in_memory or is_url(path))
    return is_of_files and len(train) <= MOST_TRAINED
