"""Refused combinations of settings that few runs have; each is a pair as in REFUSED of combinations.py."""

from collections.abc import Callable
from typing import Any

from configs.schema import AUTO, Config
from configs.tables import OF_USERS

Rows = tuple[tuple[Callable[[Config, Any], Any], str], ...]


def _is_range(c: Config) -> bool:
    """Return whether DATA.RANGE has a lowest and a highest value for all channels or for each."""
    limits = c.DATA.RANGE
    is_complete = len(limits) in (0, 2, 2 * c.DATA.IMAGE_CHANNELS)
    return is_complete and all(low < high for low, high in zip(limits[::2], limits[1::2], strict=True))


# DATA.PIXELS other than 8bit
NATIVE: Rows = (
    (
        lambda c, o: c.DATA.DATASET not in OF_USERS,
        "{DATA.PIXELS} must be 8bit with {DATA.DATASET} whose images have 8 bits; other values need "
        f"{', '.join(OF_USERS)}",
    ),
    (
        lambda c, o: c.TRAIN.AUTO_AUGMENT and not c.START.EVAL,
        "{TRAIN.AUTO_AUGMENT} must be empty with {DATA.PIXELS} because its operations are made for 8-bit colours; use "
        "TRAIN.COLOR_JITTER (brightness and contrast), crops, flips, erasing and mixing",
    ),
    (
        lambda c, o: c.TRAIN.DISTILLATION_TYPE != "none" and not c.START.EVAL,
        "{DATA.PIXELS} must be 8bit with {TRAIN.TEACHER_MODEL} because teachers take 8-bit colours",
    ),
    (
        lambda c, o: not _is_range(c),
        "{DATA.RANGE} must have a lowest and a highest value, for all channels or for each of the "
        "{DATA.IMAGE_CHANNELS} such as [0,4095]",
    ),
    (
        lambda c, o: (
            c.DATA.RGB and (len({*c.DATA.RGB}) != 3 or len(c.DATA.RGB) != 3 or max(c.DATA.RGB) >= c.DATA.IMAGE_CHANNELS)
        ),
        "{DATA.RGB} must have three different numbers of channels, counted from 0, with {DATA.IMAGE_CHANNELS} such as "
        "[2,1,0]",
    ),
)
# DIST.STRATEGY fsdp2
SHARDED: Rows = (
    (
        lambda c, o: c.TRAIN.CLIP_MODE == "agc" and c.TRAIN.GRAD_CLIP,
        "{TRAIN.CLIP_MODE} must be norm or value with {DIST.STRATEGY} because agc needs norms of whole vectors, but "
        "each process has only parts of them",
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
    rows = NATIVE if config.DATA.is_native else ()
    return (*rows, *SHARDED) if config.DIST.STRATEGY == "fsdp2" else rows
