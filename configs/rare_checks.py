"""Refuses settings that contradict what few runs have: other targets than classes, native pixels, sharded models.

The messages are those of checks.py.
"""

from collections.abc import Callable
from typing import NoReturn

from configs.schema import AUTO, Config
from configs.tables import OF_USERS

Refuse = Callable[[str], NoReturn]  # raises ConfigError with a message


def check_labels(c: Config, refuse: Refuse) -> None:
    """Refuse settings that contradict several labels for each image."""
    if c.DATA.DATASET != "csv":
        refuse("{DATA.DATASET} must be csv with {LABELS} because images of other data sets have one label")
    if c.TRAIN.LOSS not in c.task.losses:
        refuse(
            "{TRAIN.LOSS} must be {LOSSES} with {LABELS} because an image with several labels needs one yes or no per "
            "class"
        )
    if c.DATA.SAMPLER != "shuffle":
        refuse(
            "{DATA.SAMPLER} must be shuffle with {LABELS} because the classes of one image cannot be balanced "
            "separately"
        )
    if c.TRAIN.DISTILLATION_TYPE != "none" and not c.EVAL:
        refuse(
            "{TRAIN.DISTILLATION_TYPE} must be none with {LABELS} because distillation supports only one class per "
            "image"
        )


def check_numbers(c: Config, smoothing_is_typed: bool, refuse: Refuse) -> None:
    """Refuse settings that contradict numbers as targets, or have no effect with them."""
    without_classes = "with {TRAIN.OBJECTIVE} which has no classes"
    if c.DATA.DATASET not in ("csv", "parquet", "shards"):
        refuse(
            "{DATA.DATASET} must be csv, parquet or shards with {TRAIN.OBJECTIVE} because other data sets have classes"
        )
    if c.TRAIN.LOSS not in c.task.losses:
        refuse("{TRAIN.LOSS} must be {LOSSES} with {TRAIN.OBJECTIVE} because other losses need classes")
    if c.DATA.LABEL_SEPARATOR is not None:
        refuse(f"{{DATA.LABEL_SEPARATOR}} has no effect {without_classes}; name the columns in DATA.COLUMNS")
    if c.DATA.SAMPLER != "shuffle":
        refuse(f"{{DATA.SAMPLER}} must be shuffle {without_classes}")
    if c.TRAIN.CLASS_WEIGHTS is not None:
        refuse(f"{{TRAIN.CLASS_WEIGHTS}} has no effect {without_classes}; leave it out")
    if smoothing_is_typed and c.TRAIN.SMOOTHING != Config().TRAIN.SMOOTHING:  # recipes set it too
        refuse(f"{{TRAIN.SMOOTHING}} has no effect {without_classes}; leave it out")
    if c.TRAIN.cuts:
        refuse(
            "{TRAIN.CUTMIX_ALPHA} and {TRAIN.CUTMIX_MINMAX} must be off "
            f"{without_classes}; TRAIN.MIXUP_ALPHA mixes numbers too"
        )
    if c.TRAIN.DISTILLATION_TYPE not in ("none", "soft") and not c.EVAL:
        refuse(
            "{TRAIN.DISTILLATION_TYPE} must be none or soft with {TRAIN.OBJECTIVE} because a teacher's numbers are no "
            "class"
        )


def check_native_pixels(c: Config, refuse: Refuse) -> None:
    """Refuse settings that contradict images with the values of their files."""
    data = c.DATA
    if data.DATASET not in OF_USERS:
        refuse(
            "{DATA.PIXELS} must be 8bit with {DATA.DATASET} whose images have 8 bits; other values need "
            f"{', '.join(OF_USERS)}"
        )
    if c.TRAIN.AUTO_AUGMENT and not c.EVAL:
        refuse(
            "{TRAIN.AUTO_AUGMENT} must be empty with {DATA.PIXELS} because its operations are made for 8-bit colours; "
            "use TRAIN.COLOR_JITTER (brightness and contrast), crops, flips, erasing and mixing"
        )
    if c.TRAIN.DISTILLATION_TYPE != "none" and not c.EVAL:
        refuse("{DATA.PIXELS} must be 8bit with {TRAIN.TEACHER_MODEL} because teachers take 8-bit colours")
    limits = data.RANGE
    is_complete = len(limits) in (0, 2, 2 * data.IMAGE_CHANNELS)
    if not is_complete or not all(low < high for low, high in zip(limits[::2], limits[1::2], strict=True)):
        refuse(
            "{DATA.RANGE} must have a lowest and a highest value, for all channels or for each of the "
            "{DATA.IMAGE_CHANNELS} such as [0,4095]"
        )
    if data.RGB and (len(data.RGB) != 3 or len({*data.RGB}) != 3 or max(data.RGB) >= data.IMAGE_CHANNELS):
        refuse(
            "{DATA.RGB} must have three different numbers of channels, counted from 0, with {DATA.IMAGE_CHANNELS} such "
            "as [2,1,0]"
        )


def check_sharding(c: Config, refuse: Refuse) -> None:
    """Refuse settings that contradict sharded weights (DIST.STRATEGY fsdp2)."""
    if c.TRAIN.CLIP_MODE == "agc" and c.TRAIN.GRAD_CLIP:
        refuse(
            "{TRAIN.CLIP_MODE} must be norm or value with {DIST.STRATEGY} because agc needs norms of whole vectors, "
            "but each process has only parts of them"
        )
    if c.EVAL:
        return
    if c.DATA.BATCH_SIZE == AUTO:
        refuse("{DATA.BATCH_SIZE} must be a number with {DIST.STRATEGY} because one process alone cannot try the batch")
    if c.AMP and c.PRECISION.MODE != "autocast":
        refuse("{PRECISION.MODE} must be autocast with {DIST.STRATEGY} which supports no other mode")
    if c.COMPILE not in (False, "blocks"):
        refuse("{COMPILE} must be blocks with {DIST.STRATEGY} because weights are gathered block by block")
