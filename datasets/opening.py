"""open_data: the only way from settings to images. They are finished: divided, numbered, measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from configs.schema import Config, Data
from configs.tables import import_named
from datasets.classes import number_classes, renumber, without_new_classes
from datasets.sources import find_source
from datasets.split import describe_split, split
from datasets.split.parts import warn_of_lacking_classes
from datasets.types import UNKNOWN, ImageSet, Known, SavedData, Settled
from utils.distributed import Process
from utils.errors import ConfigError, DataError, did_you_mean
from utils.text import is_url

NUM_SMALLEST = 3  # the number of smallest classes that the log names
Wanted = Literal["both", "validation"]  # which parts are wanted; without "both", the training part may be missing
Parts = tuple[
    ImageSet | None, ImageSet
]  # training images, unless only the validation part is wanted; validation images


class OpenedData(NamedTuple):
    """The finished images of a data set, and the settings that they decided."""

    train: ImageSet | None  # None if only the validation part is wanted
    val: ImageSet
    settings: list[Settled]
    config: Config  # with these settings


def open_data(
    config: Config,
    wanted: Wanted = "both",
    known: Known = UNKNOWN,
    process: Process | None = None,
    *,
    say: Callable[[str], None] = print,
    output: str | None = None,
    cached: Callable[[Parts], Parts] = lambda parts: parts,
) -> OpenedData:
    """Return the images of DATA.DATASET: divided, numbered, measured. Collective if it gets a process.

    `say` reports a download; `output`: the folder that the run writes to; `cached`: reads images through a cache.
    """
    process = process or Process(torch.device("cpu"))
    train, val = process.after_first(lambda: cached(_read(config, wanted == "validation", known.saved, say, output)))
    if wanted == "validation" and known.outputs and val.classes != known.outputs and {*val.classes} <= {*known.outputs}:
        (val,) = renumber([val], known.outputs)
    settings: list[Settled] = []
    if config.task.measured:
        settings, train, val = import_named("datasets", config.task.measured)(config, known, train, val)
    if val.pixels.measured_by:
        given = config, known, process, train, val
        more, train, val = import_named("datasets", val.pixels.measured_by)(*given)
        settings = [*settings, *more]
    values = {each.name.removeprefix("DATA."): each.value for each in settings}
    return OpenedData(train, val, settings, replace(config, DATA=replace(config.DATA, **values)))


def _read(
    config: Config, only_validation: bool, saved: SavedData | None, say: Callable[[str], None], output: str | None
) -> Parts:
    """Return the checked and numbered parts, before anything is measured."""
    data = config.DATA
    try:
        train, val = find_source(data.DATASET, data.DATA_PATH)(config, only_validation, say)
    except OSError as error:
        raise DataError(f"DATA.DATA_PATH: {data.DATA_PATH} cannot be read ({error})") from error
    whole = train if val is None else val
    if whole.is_listing:
        from datasets.sources.folder import refuse_doubtful, refuse_output_inside

        refuse_doubtful(config, saved, whole)
        if output:
            refuse_output_inside(filter(None, (train, val)), output)
    train, val = _divide(config, train, val, saved, only_validation)
    parts = {part: each for part, each in (("training", train), ("validation", val)) if each is not None}
    for part, image_set in parts.items():
        if not len(image_set):
            from datasets.split.empty import empty_part_error

            raise empty_part_error(config, part, whole)
    numbered, notes = number_classes(config, [*parts.values()], saved, only_validation)
    numbered, notes = _look_into_files(data, numbered, notes)
    train, val = (None if train is None else numbered[0]), numbered[-1]
    _refuse_one_class(config, train, val)
    for image_set in numbered:
        _check_num_classes(config, image_set)
    counts = _describe_class_counts(train, val) if config.task.noun == "class" else ()
    notes = (*describe_split(config, val, only_validation), *counts, *notes, *val.notes)
    return train, val.with_facts(notes=notes)


def _divide(
    config: Config, train: ImageSet | None, val: ImageSet | None, saved: SavedData | None, only_validation: bool
) -> Parts:
    """Return both parts, or only the validation images that are scored. `train` are all images if there is no `val`."""
    if not only_validation:
        if val is None:
            return split(config, train, saved)
        _check_own_parts(config, train, val)
        return train, val
    if val is None:
        from datasets.split.trained_on import split_to_evaluate

        _, val = split_to_evaluate(config, train, saved)
    return None, val if config.DATA.CLASSES else without_new_classes(val, saved)


def _look_into_files(data: Data, sets: list[ImageSet], notes: list[str]) -> tuple[list[ImageSet], tuple[str, ...]]:
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
    is_one = len(val.classes) == 1 and val.meaning.has_one_name
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
