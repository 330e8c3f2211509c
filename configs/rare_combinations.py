"""Refused combinations of settings that few runs have; each is a pair as in REFUSED of combinations.py."""

from collections.abc import Callable
from typing import Any

from configs.schema import AUTO, Config
from configs.tables import OF_USERS

Rows = tuple[tuple[Callable[[Config, Any], Any], str], ...]


LABELLED = tuple(name for name in OF_USERS if name != "images")


def _is_range(c: Config) -> bool:
    """Return whether DATA.RANGE has a lowest and a highest value for all channels or for each."""
    limits = c.DATA.RANGE
    is_complete = len(limits) in (0, 2, 2 * c.DATA.IMAGE_CHANNELS)
    return is_complete and all(low < high for low, high in zip(limits[::2], limits[1::2], strict=True))


# DATA.PIXELS other than 8bit
NATIVE: Rows = (
    (
        lambda c, o: c.DATA.DATASET not in LABELLED,
        f"{{DATA.PIXELS}} must be 8bit with {{DATA.DATASET}} whose images have 8 bits; other values need {', '.join(LABELLED)}",
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
        lambda c, o: (
            c.DATA.RGB and (len({*c.DATA.RGB}) != 3 or len(c.DATA.RGB) != 3 or max(c.DATA.RGB) >= c.DATA.IMAGE_CHANNELS)
        ),
        "{DATA.RGB} must have three different numbers of channels, counted from 0, with {DATA.IMAGE_CHANNELS} such as [2,1,0]",
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


def refused_with(config: Config) -> Rows:
    """Return the combinations that the rare settings of this run refuse."""
    is_sharded = config.DIST.STRATEGY == "fsdp2"
    conditions = {NATIVE: config.DATA.is_native, SEQUENCES: config.DATA.TOKENS, SHARDED: is_sharded}
    return tuple(row for rows, applies in conditions.items() if applies for row in rows)
