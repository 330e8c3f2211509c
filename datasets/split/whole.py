"""Train on all images of a set: nothing is held out (DATA.VAL_FRACTION 0), or each image by one of several further runs
(DATA.FOLDS). Both parts are then the whole set, and no run scores images that it was trained on."""

from dataclasses import replace

import numpy as np

from configs.schema import Config
from datasets.image_set import ALL, Table
from datasets.types import SavedData
from utils.errors import ConfigError
from utils.text import counted


def learn_all(config: Config, image_set: Table, record: dict, saved: SavedData | None) -> tuple[Table, Table]:
    """Return all images twice. With DATA.FOLDS they know their folds, which the further runs hold out in turn.

    `record`: of a drawn split; `saved`: the data record of the resumed checkpoint.
    """
    refuse(config)
    kept = {name: record[name] for name in ("training", "validation", "seed", "group_by", "copies") if name in record}
    record, folds = {"rule": ALL, **kept}, None
    if config.DATA.FOLDS:
        from datasets.split.folds import folds_of

        record["folds"] = config.DATA.FOLDS
        folds = folds_of(image_set, record, saved)
        refuse_empty_folds(config, folds)
    whole = replace(image_set, split=record, folds=folds)
    return whole, whole


def refuse(config: Config) -> None:
    """Raise ConfigError if a setting needs validation images, or does not work with the further runs of DATA.FOLDS."""
    cause = f"DATA.FOLDS is {config.DATA.FOLDS}" if config.DATA.FOLDS else "DATA.VAL_FRACTION is 0"
    remedy = "leave one of them out"
    for name, value in (("TRAIN.EARLY_STOP", config.TRAIN.EARLY_STOP), ("TRAIN.BUDGET", config.TRAIN.BUDGET)):
        if value:
            raise ConfigError(
                f"{name} is {value}, but {cause}, so no epoch has validation images, which {name} needs; {remedy}, "
                "or set the number of epochs with -epochs"
            )
    if config.DATA.FOLDS and config.DIST.STRATEGY == "fsdp2":
        raise ConfigError(f"DIST.STRATEGY is fsdp2, which {cause} does not support; use ddp, or {remedy}")


def refuse_empty_folds(config: Config, folds: np.ndarray) -> None:
    num_filled = len(np.unique(folds))
    if num_filled < config.DATA.FOLDS:
        raise ConfigError(
            f"DATA.FOLDS is {config.DATA.FOLDS}, but {counted(len(folds), 'image')} (copies and groups stay together) "
            f"fill only {counted(num_filled, 'fold')}; lower -folds, or add images"
        )


def describe(config: Config, record: dict) -> str:
    """Return how a run on all images is measured, for the log."""
    if "folds" not in record:
        return "none, because DATA.VAL_FRACTION is 0, so nothing is measured"
    groups = f", each {record['group_by']} whole" if "group_by" in record else ""
    runs = counted(record["folds"], "further run")
    return f"all of them, by {runs}, each without 1/{record['folds']} of the images{groups} (DATA.FOLDS)"
