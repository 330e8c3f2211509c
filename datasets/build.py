"""Build image sets from the settings, and the batches of one process from the image sets."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import Config, Data
from datasets.classes import number_classes, read_classes, without_new_classes
from datasets.loading.readers import EvalData, EvalReader, Reader, TrainData, TrainReader
from datasets.loading.workers import choose_workers, make_loader
from datasets.order import EpochOrder, Order
from datasets.sources import find_source
from datasets.split import describe_split, split, warn_of_other_parts
from datasets.types import ImageSet, SavedData
from utils.distributed import Process
from utils.errors import ConfigError, DataError, ensure
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
    train, val = _read(config, say, output)
    whole = train if val is None else val
    if whole.doubt and not _are_listed(config, saved, whole.classes):
        raise DataError(whole.doubt)
    _refuse_output_inside(filter(None, (train, val)), output)
    if val is None:
        train, val = split(config, train, saved)
    elif not config.START.EVAL:
        _check_own_parts(config, val)
    if config.START.EVAL:
        val.notes = (*val.notes, *warn_of_other_parts(val, saved))
        train, val = None, val if data.CLASSES else without_new_classes(val, saved)
    parts = {part: each for part, each in (("training", train), ("validation", val)) if each is not None}
    for part, image_set in parts.items():
        if not len(image_set):
            raise _empty_part_error(config, part, whole)
    notes = number_classes(config, list(parts.values()), saved)
    _refuse_one_class(config, train, val)
    for image_set in parts.values():
        _check_num_classes(config, image_set)
    val.notes = (describe_split(config, val), *_describe_smallest(train, val), *notes, *val.notes)
    return train, val


def _read(config: Config, say: Callable[[str], None], output: str | None) -> tuple[ImageSet | None, ImageSet | None]:
    """Return both sets as the source returns them. The validation set is None if it will be held out later."""
    data, name = config.DATA, config.DATA.DATASET
    read = find_source(name)
    try:
        train, val = read(config, say)
    except OSError as error:
        raise DataError(f"DATA.DATA_PATH: {data.DATA_PATH} cannot be read ({error})") from error
    except DataError as error:
        raise (output and _output_in_data(data.DATA_PATH, output, error)) or error from None
    whole = train if val is None else val
    has_origin = bool(whole.split.get("training")) or config.START.EVAL
    ensure(has_origin, f"{name}: the `split` of its image sets must name where the images come from")
    return train, val


def _refuse_output_inside(parts: Iterable[ImageSet], output: str | None) -> None:
    """Raise ConfigError if the output folder is inside a folder from which all images are read."""
    for part in parts:
        if output and (place := part.place_of(output)):
            raise ConfigError(
                f"SAVE: {output} is in {place}, so the run's own pictures would be read as data; choose a folder "
                "outside with -output"
            )


def _check_own_parts(config: Config, val: ImageSet) -> None:
    """Refuse DATA.FOLD for data with its own validation images, and warn if DATA.VAL_FRACTION has no effect."""
    data, name = config.DATA, config.DATA.DATASET
    if data.FOLD:
        if "folds" not in val.split:
            raise ConfigError(
                f"DATA.FOLD is {data.FOLD}, but {name} has its own validation images ({val.split['validation']}); "
                "leave DATA.FOLD out, or set -data_path to the folder or file of one part to divide only that part"
            )
    elif data.VAL_FRACTION not in (Data.VAL_FRACTION, val.split.get("fraction")):
        text = f"DATA.VAL_FRACTION {data.VAL_FRACTION:g} has no effect, because {name} has its own validation images"
        val.notes = (f"warning: {text}", *val.notes)


def _output_in_data(path: str, output: str, error: DataError) -> ConfigError | None:
    """Return a clearer error if `error` is about the run's own output folder inside the data, else None."""
    root = Path(path).expanduser()
    below = Path(os.path.relpath(os.path.realpath(output), os.path.realpath(root)))
    if not any(str(error).startswith(f"{root / each}: ") for each in (below, *below.parents) if each.name):
        return None
    return ConfigError(f"SAVE: {output} is inside the data ({error}); choose a folder outside with -output")


def _are_listed(config: Config, saved: SavedData | None, classes: list[str]) -> bool:
    """Return whether the settings, or the resumed or evaluated run, name all of these classes."""
    if config.DATA.CLASSES:
        known = read_classes(config.DATA.CLASSES, "DATA.CLASSES", "surrogateescape", may_repeat=False)
    else:
        known = saved.classes if saved else []
    return {*classes} <= {normalize("NFC", name) for name in known}


def _empty_part_error(config: Config, part: str, whole: ImageSet) -> DataError:
    """Return an error that explains why a part is empty. `whole`: the validation images, or all images."""
    data, name = config.DATA, config.DATA.DATASET
    is_by_fraction = part == "validation" and data.VAL_FRACTION and not (data.FOLD or data.GROUP_BY)
    if not is_by_fraction or whole.count_classes().max(initial=0) != 1:
        held_out = f"DATA.FOLD ({data.FOLD})" if data.FOLD else f"DATA.VAL_FRACTION ({data.VAL_FRACTION:g})"
        group = f"; each value of DATA.GROUP_BY ({data.GROUP_BY}) stays whole" if data.GROUP_BY else ""
        return DataError(
            f"{name}: there are no {part} images in {data.DATA_PATH}; check the lists or folders there, and "
            f"{held_out} if the data has no validation part of its own{group}"
        )
    return DataError(
        f"DATA.DATA_PATH: each class in {data.DATA_PATH} has only one image, so none can be held out for validation; "
        "add images (a class needs two) or a validation part (layouts: docs/data.md)"
    )


def _describe_smallest(train: ImageSet | None, val: ImageSet) -> list[str]:
    """Describe the classes with the fewest images: the model learns them worst, and their accuracy is least certain."""
    if train is None or val.makes_batches or len(val.classes) == 1:
        return []
    counts = train.count_classes(), val.count_classes()
    smallest = sorted(np.flatnonzero(total := sum(counts)).tolist(), key=lambda number: total[number])[:NUM_SMALLEST]
    found = (f"{val.classes[each]} ({counts[0][each]:,}/{counts[1][each]:,})" for each in smallest)
    return [f"smallest classes (train/val): {', '.join(found)}"]


def _refuse_one_class(config: Config, train: ImageSet | None, val: ImageSet) -> None:
    """Raise DataError if all training images have the same class, or, in an evaluation, if only one class is known."""
    name = val.target_names()[int(val.targets[0])]
    is_one = len(val.classes) == 1 and not val.labels_are_numbers and not val.label_sets
    if val.makes_batches or config.TRAIN.OBJECTIVE == "features":
        return
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
        target = image_set.targets[first]
        number = max(image_set.label_sets[target]) if image_set.label_sets else int(target)
        raise DataError(
            f"{image_set.name(first)}: its class {names[number]!r} has number {number} (from 0), but "
            f"MODEL.NUM_CLASSES is {num_classes}; set -num_classes {len(names)} or leave it out"
        )


def build_order(config: Config, image_set: ImageSet, world_size: int, resumed_global_batch: int | None = None) -> Order:
    """Return the order of the training images. `resumed_global_batch` replaces the settings' global batch."""
    data, train = config.DATA, config.TRAIN
    order = Order(
        num_images=len(image_set),
        batch_size=data.BATCH_SIZE,
        world_size=world_size,
        num_accumulated=train.ACCUM_ITER,
        drop_last=data.DROP_LAST,
        seed=config.SEED,
        epoch_order=_epoch_order(config, image_set),
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


def _epoch_order(config: Config, image_set: ImageSet) -> EpochOrder:
    """Return the function of DATA.SAMPLER that maps seed and epoch to the order of the epoch."""
    if config.DATA.SAMPLER == "shuffle":
        return image_set.epoch_order
    from datasets.balance import order_of_balanced_epochs

    return order_of_balanced_epochs(image_set)


def class_weights(config: Config, image_set: ImageSet) -> list[float] | None:
    """Return TRAIN.CLASS_WEIGHTS for each output of the model, or None if it is not set."""
    if config.TRAIN.CLASS_WEIGHTS is None:
        return None
    from datasets.balance import read_class_weights

    return read_class_weights(config, image_set)


def _choose_reader(config: Config, is_training: bool) -> type[Reader]:
    if config.DATA.TOKENS:
        from extras.native_aspect.readers import EvalSequenceReader, TrainSequenceReader

        return TrainSequenceReader if is_training else EvalSequenceReader
    return TrainReader if is_training else EvalReader


def build_train_data(config: Config, image_set: ImageSet, process: Process, order: Order | None = None) -> TrainData:
    """Return the training data of one process in this order, or in the order of a new run if `order` is None."""
    order = order or build_order(config, image_set, process.world_size)
    load = image_set.makes_batches and image_set.makes_batches(config, order.batch_size, process.rank, process.device)
    if not load:
        reader = _choose_reader(config, is_training=True)(image_set, config)
        load = make_loader(reader, choose_workers(config, image_set, process), process.device)
    return TrainData(image_set, order, process.rank, load)


def build_eval_data(config: Config, image_set: ImageSet, process: Process) -> EvalData:
    """Return the evaluation data of one process."""
    batch_size = config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE
    load = image_set.makes_batches and image_set.makes_batches(config, batch_size, process.rank, process.device)
    if not load:
        reader = _choose_reader(config, is_training=False)(image_set, config)
        load = make_loader(reader, choose_workers(config, image_set, process), process.device)
    return EvalData(image_set, batch_size, process.rank, process.world_size, load, is_padded=config.COMPILE)


def watches(train: ImageSet, val: ImageSet, path: str) -> bool:
    """Return whether a run looks for validation images that are also training images (overlap.py).

    A run does not compare training sets of more than MOST_TRAINED images, images in memory (which come from published
    data sets), or remote or streamed images (which cannot be read in arbitrary order).
    """
    is_of_files = not (train.in_memory or train.makes_batches or val.in_memory or is_url(path))
    return is_of_files and len(train) <= MOST_TRAINED
