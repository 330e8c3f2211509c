"""The settings that few runs contradict: what the model learns (TASKS in tables.py), and combinations of rare settings."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from configs.schema import AUTO
from configs.tables import losses_of


class Refusal(NamedTuple):
    """A setting that contradicts a task, or that has no effect with it."""

    setting: str  # or a property of the settings, such as TRAIN.mixes
    how: str  # the end of the message, which starts with the setting; as in configs/combinations.py
    allowed: tuple[str, ...] = ()  # the accepted values; empty: only the default
    if_typed: bool = False  # refused only on the command line, because recipes set it too
    only_in_training: bool = False


NO_CLASSES = "with {TRAIN.OBJECTIVE} which has no classes"
LABELS = (
    Refusal("DATA.DATASET", "must be csv with {LABELS} because images of other data sets have one label", ("csv",)),
    Refusal(
        "TRAIN.LOSS",
        f"must be {' or '.join(losses_of('labels'))} with {{LABELS}} because an image with several labels needs one "
        "yes or no per class",
        losses_of("labels"),
    ),
    Refusal(
        "DATA.SAMPLER",
        "must be shuffle with {LABELS} because the classes of one image cannot be balanced separately",
    ),
    Refusal(
        "TRAIN.DISTILLATION_TYPE",
        "must be none with {LABELS} because distillation supports only one class per image",
        only_in_training=True,
    ),
)
FEATURES = (
    Refusal("TRAIN.DISTILLATION_TYPE", f"must be none {NO_CLASSES}"),
    Refusal("TRAIN.LOSS", f"has no effect {NO_CLASSES}; leave it out"),
    Refusal("TRAIN.CLASS_WEIGHTS", f"has no effect {NO_CLASSES}; leave it out"),
    Refusal("DATA.SAMPLER", f"must be shuffle {NO_CLASSES}"),
    Refusal("TRAIN.mixes", "must be off with {TRAIN.OBJECTIVE} because they mix the labels of images"),
    Refusal("TRAIN.SMOOTHING", f"has no effect {NO_CLASSES}; leave it out", if_typed=True),
    Refusal("DATA.has_several_labels", f"has no effect {NO_CLASSES}; leave it out"),
    Refusal("DATA.TOKENS", "must be null with {TRAIN.OBJECTIVE} because features are learned from square images"),
)
NUMBERS = (
    Refusal(
        "DATA.DATASET",
        "must be csv, parquet or shards with {TRAIN.OBJECTIVE} because other data sets have classes",
        ("csv", "parquet", "shards"),
    ),
    Refusal(
        "TRAIN.LOSS",
        f"must be {' or '.join(losses_of('numbers'))} with {{TRAIN.OBJECTIVE}} because other losses need classes",
        losses_of("numbers"),
    ),
    Refusal("DATA.LABEL_SEPARATOR", f"has no effect {NO_CLASSES}; name the columns in DATA.COLUMNS"),
    Refusal("DATA.SAMPLER", f"must be shuffle {NO_CLASSES}"),
    Refusal("TRAIN.CLASS_WEIGHTS", f"has no effect {NO_CLASSES}; leave it out"),
    Refusal("TRAIN.SMOOTHING", f"has no effect {NO_CLASSES}; leave it out", if_typed=True),
    Refusal("TRAIN.cuts", f"must be off {NO_CLASSES}; TRAIN.MIXUP_ALPHA mixes numbers too"),
    Refusal(
        "TRAIN.DISTILLATION_TYPE",
        "must be none or soft with {TRAIN.OBJECTIVE} because a teacher's numbers are no class",
        ("none", "soft"),
        only_in_training=True,
    ),
)


# --- combinations of rare settings: pairs as in REFUSED of configs/combinations.py ---


Rows = tuple[tuple[Callable[[Any, Any], Any], str], ...]


OF_USERS = ("imagefolder", "images", "csv", "shards", "parquet")


def _is_range(c: Any) -> bool:
    """Return whether DATA.RANGE has a lowest and a highest value for all channels or for each."""
    limits = c.DATA.RANGE
    is_complete = len(limits) in (0, 2, 2 * c.DATA.IMAGE_CHANNELS)
    return is_complete and all(low < high for low, high in zip(limits[::2], limits[1::2], strict=True))


def _is_pattern(files: str, channels: int) -> bool:
    """Return whether DATA.CHANNEL_FILES has {id} and a list of one name for each channel."""
    lists = re.findall(r"\{([^{}]+)\}", files.replace("{id}", "", 1))
    return "{id}" in files and len(lists) == 1 and len({*lists[0].split(",")}) == channels


# DATA.PIXELS other than 8bit
NATIVE: Rows = (
    (
        lambda c, o: c.DATA.DATASET not in OF_USERS,
        f"{{DATA.PIXELS}} must be 8bit with {{DATA.DATASET}} whose images have 8 bits; other values need {', '.join(OF_USERS)}",
    ),
    (
        lambda c, o: c.TRAIN.AUTO_AUGMENT and not c.START.EVAL,
        "{TRAIN.AUTO_AUGMENT} must be empty with {DATA.PIXELS} because its operations are made for 8-bit colours; use "
        "TRAIN.COLOR_JITTER (brightness and contrast), crops, flips, erasing and mixing",
    ),
    (
        lambda c, o: c.DATA.TOKENS,
        "{DATA.TOKENS} must be null with {DATA.PIXELS} because sequences of patches have 8 bits",
    ),
    (
        lambda c, o: (c.TRAIN.OBJECTIVE == "features" or c.TRAIN.DISTILLATION_TYPE != "none") and not c.START.EVAL,
        "{DATA.PIXELS} must be 8bit with {TRAIN.TEACHER_MODEL} because teachers take 8-bit colours",
    ),
    (
        lambda c, o: not _is_range(c),
        "{DATA.RANGE} must have a lowest and a highest value, for all channels or for each of the {DATA.IMAGE_CHANNELS} "
        "such as [0,4095]",
    ),
    (
        lambda c, o: c.DATA.RGB and (len(c.DATA.RGB) != 3 or max(c.DATA.RGB) >= c.DATA.IMAGE_CHANNELS),
        "{DATA.RGB} must have three numbers of channels, counted from 0, with {DATA.IMAGE_CHANNELS} such as [2,1,0]",
    ),
    (
        lambda c, o: c.DATA.CHANNEL_FILES and not _is_pattern(c.DATA.CHANNEL_FILES, c.DATA.IMAGE_CHANNELS),
        "{DATA.CHANNEL_FILES} must have {id} and one list of different names, as many as {DATA.IMAGE_CHANNELS} says, such "
        "as {id}_{B02,B03}.tif",
    ),
)
# DATA.TOKENS: images at their own aspect ratio
SEQUENCES: Rows = (
    (
        lambda c, o: c.TRAIN.SIZE_SCHEDULE,
        "{TRAIN.SIZE_SCHEDULE} must be empty with {DATA.TOKENS} where DATA.TRAIN_TOKENS varies the size of images",
    ),
    (
        lambda c, o: c.DATA.TRAIN_CROP != "rrc",
        "{DATA.TRAIN_CROP} must be rrc with {DATA.TOKENS} because simple crops are square",
    ),
    (
        lambda c, o: c.TRAIN.CUTMIX_MINMAX,
        "{TRAIN.CUTMIX_MINMAX} must be empty with {DATA.TOKENS} because images of different sizes have no common box; use "
        "TRAIN.CUTMIX_ALPHA",
    ),
    (
        lambda c, o: c.TRAIN.MIXUP_MODE != "batch",
        "{TRAIN.MIXUP_MODE} must be batch with {DATA.TOKENS} because timm mixes whole batches of such images",
    ),
    (
        lambda c, o: c.DATA.cache_side,
        "{DATA.CACHE} must be none or disk with {DATA.TOKENS} because a cache of reduced images would lose detail",
    ),
)
# DIST.STRATEGY fsdp2
SHARDED: Rows = (
    (
        lambda c, o: c.TRAIN.CLIP_MODE == "agc" and c.TRAIN.GRAD_CLIP,
        "{TRAIN.CLIP_MODE} must be norm or value with {DIST.STRATEGY} because agc needs norms of whole vectors, but each "
        "process has only parts of them",
    ),
    (
        lambda c, o: c.DATA.BATCH_SIZE == AUTO and not c.START.EVAL,
        "{DATA.BATCH_SIZE} must be a number with {DIST.STRATEGY} because one process alone cannot try the batch",
    ),
    (
        lambda c, o: c.AMP and c.PRECISION.MODE != "autocast" and not c.START.EVAL,
        "{PRECISION.MODE} must be autocast with {DIST.STRATEGY} which supports no other mode",
    ),
    (
        lambda c, o: c.COMPILE not in (False, "blocks") and not c.START.EVAL,
        "{COMPILE} must be blocks with {DIST.STRATEGY} because weights are gathered block by block",
    ),
)


def refused_with(config: Any) -> Rows:
    """Return the combinations that the rare settings of this run refuse."""
    is_sharded = config.DIST.STRATEGY == "fsdp2"
    found = {NATIVE: config.DATA.is_native, SEQUENCES: config.DATA.TOKENS, SHARDED: is_sharded}
    return tuple(row for rows, applies in found.items() if applies for row in rows)
