"""The settings that contradict what the model learns, or that have no effect with it; TASKS in tables.py names them."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """A setting that contradicts a task, or that has no effect with it."""

    setting: str  # or a property of the settings, such as TRAIN.cuts
    how: str  # the end of the message, which starts with the setting; as in configs/combinations.py
    allowed: tuple[str, ...] = ()  # the accepted values; empty: the default, or the losses of the task
    if_typed: bool = False  # refused only on the command line, because recipes set it too
    only_in_training: bool = False


NO_CLASSES = "with {TRAIN.OBJECTIVE} which has no classes"
LABELS = (
    Refusal("DATA.DATASET", "must be csv with {LABELS} because images of other data sets have one label", ("csv",)),
    Refusal(
        "TRAIN.LOSS",
        "must be {LOSSES} with {LABELS} because an image with several labels needs one yes or no per class",
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
NUMBERS = (  # for tasks that read numbers from columns
    Refusal(
        "DATA.DATASET",
        "must be csv, parquet or shards with {TRAIN.OBJECTIVE} because other data sets have classes",
        ("csv", "parquet", "shards"),
    ),
    Refusal("TRAIN.LOSS", "must be {LOSSES} with {TRAIN.OBJECTIVE} because other losses need classes"),
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
