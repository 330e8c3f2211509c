"""Refuse data whose parts cannot be used."""

import numpy as np

from configs.schema import Config
from datasets.image_set import Table
from utils.commands import page
from utils.errors import ConfigError, DataError, did_you_mean


def check_own_parts(config: Config, train: Table, val: Table) -> None:
    """Refuse folds for data with its own validation images, and classes that only validation images have."""
    for name, value in (("DATA.FOLD", config.DATA.FOLD), ("DATA.FOLDS", config.DATA.FOLDS)):
        if value:
            raise ConfigError(
                f"{name} is {value}, but {config.DATA.DATASET} has its own validation images "
                f"({val.split['validation']}); leave {name} out, or set -data_path to the folder or file of one part "
                "to divide only that part"
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


def empty_part_error(config: Config, part: str, whole: Table) -> DataError:
    """Return an error that explains why a part is empty. `whole`: the validation images, or all images."""
    data, name = config.DATA, config.DATA.DATASET
    held_out = f"DATA.FOLD ({data.FOLD})" if data.FOLD else f"DATA.VAL_FRACTION ({data.VAL_FRACTION:g})"
    group = f"; each value of DATA.GROUP_BY ({data.GROUP_BY}) stays whole" if data.GROUP_BY else ""
    by_fraction = part == "validation" and data.VAL_FRACTION and not (data.FOLD or data.GROUP_BY)
    alone = ""
    if by_fraction and whole.count_classes().max(initial=0) == 1:
        alone = "; a class needs two images, so that one can be held out"
    return DataError(
        f"DATA.DATA_PATH: {data.DATA_PATH} has no {part} images for -dataset {name}; check the lists or folders there, "
        f"and {held_out} if the data has no validation part of its own{group}{alone} (layouts: {page('docs/data.md')})"
    )
