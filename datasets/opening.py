"""open_data: the only way from settings to images. They are finished: divided, numbered, measured."""

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from configs.schema import Config
from configs.tables import SOURCES
from datasets.image_set import ImageSet, Table
from datasets.pixels import Pixels
from datasets.pixels.kinds import pixels_of
from datasets.split import describe_split, split, warn_of_lacking_classes
from datasets.types import NO_PRIOR_FACTS, CacheProgress, PriorFacts, SavedData, Settled
from utils.distributed import Process
from utils.errors import ConfigError, DataError, did_you_mean
from utils.text import is_url

MOST_SEARCHED = 5_000  # images; a larger set is divided without a search for copies, which reads them all

PartsToRead = Literal["both", "validation"]  # the parts to read; with "validation", the training part may be missing


class OpenedData(NamedTuple):
    """The finished images of a data set, and the settings that they decided."""

    train: ImageSet | None  # None if only the validation part is wanted
    val: ImageSet
    settings: list[Settled]
    config: Config  # with these settings


def open_data(
    config: Config,
    parts: PartsToRead = "both",
    prior: PriorFacts = NO_PRIOR_FACTS,
    process: Process | None = None,
    *,
    say: Callable[[str], None] = print,
    output: str | None = None,
    cache: CacheProgress | None = None,
) -> OpenedData:
    """Return the images of DATA.DATASET: divided, numbered, measured. Collective if it gets a process.

    `say` reports a download; `output`: the folder that the run writes to; `cache`: reads images through
    DATA.CACHE, and reports it.
    """
    process = process or Process(torch.device("cpu"))
    only_validation, saved = parts == "validation", prior.saved
    train, val = process.after_first(lambda: _read(config, only_validation, saved, say, output))
    if val is None:
        train = replace(train, copies=_find_copies(config, train, only_validation, saved, process))
    train, val, pixels = process.after_first(lambda: _finish(config, train, val, only_validation, saved))
    if only_validation and prior.outputs and val.classes != prior.outputs and {*val.classes} <= {*prior.outputs}:
        from datasets.class_numbers import renumber

        (val,) = renumber([val], prior.outputs)
    settings, train, val = val.meaning.settle(config, prior, train, val)
    sets = (None if train is None else ImageSet.of(train, pixels)), ImageSet.of(val, pixels)
    if cache is not None and config.DATA.CACHE != "none":
        from datasets.cache import cache_image_sets

        with cache.within():
            sets = process.after_first(lambda: cache_image_sets(config, sets, cache))
    train, val = sets
    more, pixels, notes = pixels.measure(config, prior, process, train)
    train = None if train is None else replace(train, pixels=pixels)
    val = replace(val, pixels=pixels, notes=(*val.notes, *notes))
    settings = [*settings, *more]
    for setting in settings:
        section, name = setting.name.split(".")
        config = config.changed(section, **{name: setting.value})
    return OpenedData(train, val, settings, config)


def _read(
    config: Config, only_validation: bool, saved: SavedData | None, say: Callable[[str], None], output: str | None
) -> tuple[Table | None, Table | None]:
    """Return the training and the validation images, or all images and None."""
    data = config.DATA
    try:
        train, val = read_source(config, only_validation, say)
    except OSError as error:
        remedy = ""
        if isinstance(error, PermissionError) and error.filename:
            remedy = f"; its owner can allow it: chmod -R u+rX {shlex.quote(os.fsdecode(error.filename))}"
        raise DataError(f"DATA.DATA_PATH: {data.DATA_PATH} cannot be read ({error}){remedy}") from error
    whole = train if val is None else val
    if whole.is_listing:
        from datasets.sources.folder import refuse_doubtful, refuse_output_inside

        refuse_doubtful(config, saved, whole)
        if output:
            refuse_output_inside(filter(None, (train, val)), output)
    return train, val


def _find_copies(
    config: Config, table: Table, only_validation: bool, saved: SavedData | None, process: Process
) -> np.ndarray | None:
    """Return the copies among all images if some of a small set of files will be held out. Collective."""
    data = config.DATA
    if saved and saved.split:
        is_divided = bool(saved.split.get("copies"))
    else:
        is_published = table.split.get("rule") == "position"
        is_divided = bool(data.VAL_FRACTION or data.FOLD or data.FOLDS) and not (only_validation or is_published)
    is_of_files = not (table.storage.in_memory or is_url(data.DATA_PATH))
    if not (is_divided and is_of_files) or (len(table) > MOST_SEARCHED and not saved):
        return None
    from datasets.split.together import find_copies

    return process.first(lambda: find_copies(table, pixels_of(data), saved, MOST_SEARCHED))


def _finish(
    config: Config, train: Table | None, val: Table | None, only_validation: bool, saved: SavedData | None
) -> tuple[Table | None, Table, Pixels]:
    """Return the checked and numbered parts, and their pixels, before anything is measured.

    `train` are all images if there is no `val`.
    """
    whole = train if val is None else val
    if only_validation:
        train, val = None, _choose_scored(config, train, val, saved)
    elif val is None:
        train, val = split(config, train, saved).tables(train)
    else:
        from datasets.split.refusals import check_own_parts

        check_own_parts(config, train, val)
    for part, table in (("training", train), ("validation", val)):
        if table is not None and not len(table):
            from datasets.split.refusals import empty_part_error

            raise empty_part_error(config, part, whole)
    numbered, notes = _number_classes(config, [val] if train is None else [train, val], saved, only_validation)
    pixels, pixel_notes = ImageSet.of(numbered[0], pixels_of(config.DATA)).look_into(is_url(config.DATA.DATA_PATH))
    train, val = (None if train is None else numbered[0]), numbered[-1]
    counts: list[str] = []
    if not val.makes_batches:
        _refuse_one_class(config, train, val)
        counts = [] if train is None else _describe_counts(train, val)
    for table in numbered:
        _check_num_classes(config, table)
    notes = (*describe_split(config, val, only_validation), *counts, *notes, *pixel_notes, *val.notes)
    return train, replace(val, notes=notes), pixels


def _choose_scored(config: Config, train: Table | None, val: Table | None, saved: SavedData | None) -> Table:
    """Return the validation images that are scored."""
    if val is None:
        from datasets.split.trained_on import split_to_evaluate

        val = split_to_evaluate(config, train, saved)
    if saved and not config.DATA.CLASSES:
        from datasets.class_numbers import without_new_classes

        val = without_new_classes(val, saved)
    return val


def _number_classes(
    config: Config, parts: list[Table], saved: SavedData | None, only_validation: bool
) -> tuple[list[Table], list[str]]:
    """Number the classes of all parts in the same way. Return the parts, and lines for the log."""
    if parts[0].meaning.labels_are == "listed" and not config.DATA.CLASSES and not (saved and saved.classes):
        return parts, []
    from datasets.class_numbers import number_classes

    return number_classes(config, parts, saved, only_validation)


def _describe_counts(train: Table, val: Table) -> list[str]:
    """Describe the smallest classes, and warn of those that only one part has; a split gives this warning itself."""
    counts = train.count_classes(), val.count_classes()
    lines = val.meaning.describe_counts(val.classes, *counts)
    if lines and val.split["rule"] == "folders":
        lines += warn_of_lacking_classes(val.classes, *counts)
    return lines


def _refuse_one_class(config: Config, train: Table | None, val: Table) -> None:
    """Raise DataError if all training images have the same class, or, in an evaluation, if only one class is known."""
    if not config.task.has_classes:
        return
    name = val.target_names()[int(val.targets[0])]
    is_one = len(val.classes) == 1 and val.meaning.has_one_name
    if is_one if train is None else train.targets.min() == train.targets.max():
        raise DataError(
            f"DATA.DATA_PATH: all images in {config.DATA.DATA_PATH} have the same class, {name!r}, so there is nothing "
            "to learn; -data_path must name the folder that has a folder for each class, such as photos/cat and "
            "photos/dog (halfstep train photos), or a list of several classes"
        )


def _check_num_classes(config: Config, table: Table) -> None:
    num_classes, names = config.MODEL.NUM_CLASSES, table.classes
    if num_classes is None or num_classes >= len(names):
        return
    if (too_high := table.with_any(np.arange(num_classes, len(names)))).any():
        first = int(too_high.argmax())
        number = max(table.meaning.classes_of(int(table.targets[first])))
        raise DataError(
            f"{table.name(first)}: its class {names[number]!r} has number {number} (from 0), but "
            f"MODEL.NUM_CLASSES is {num_classes}; set -num_classes {len(names)} or leave it out"
        )


# --- the sources ---


# The function is long, but it only has a case for each data set.
def read_source(  # noqa: C901
    config: Config, only_validation: bool, say: Callable[[str], None]
) -> tuple[Table | None, Table | None]:
    """Read the data set, which has a row in SOURCES. Only its source is imported. `say` reports a download.

    A source gets the settings, and whether only the validation part is wanted. It returns the tables of training images
    (None if they are not wanted and not read) and of validation images, or all images and None, to be divided.
    """
    match name := config.DATA.DATASET:
        case "imagenet2012":
            from datasets.sources.listing import read_imagenet

            return read_imagenet(config, only_validation)
        case "imagefolder":
            from datasets.sources.folder import read_image_folder

            return read_image_folder(config, only_validation)
        case "csv":
            from datasets.sources.csv_list import read_csv

            return read_csv(config, only_validation)
        case "shards" if is_url(config.DATA.DATA_PATH):
            from datasets.sources.remote import read_remote_shards

            return read_remote_shards(config, only_validation, say)
        case "shards":
            from datasets.sources.shards import read_shards

            return read_shards(config, only_validation)
        case "parquet":
            from datasets.sources.parquet import read_parquet

            return read_parquet(config, only_validation)
        case "caltech101" | "caltech256":
            from datasets.sources.folder import read_caltech

            return read_caltech(config), None
        case "digits":
            from datasets.sources.arrays import read_digits

            return read_digits(), None
        case "synthetic":
            from datasets.sources.synthetic import read_synthetic

            return read_synthetic(config)
    if name in SOURCES or name.startswith("torchvision/"):
        from datasets.sources.torchvision_sets import read_torchvision

        return read_torchvision(config, only_validation, say)
    raise ConfigError(
        f"DATA.DATASET: unknown data set {name!r} (known: {', '.join(SOURCES)}){did_you_mean(name, SOURCES)}"
    )
