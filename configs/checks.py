"""Refuses settings that contradict each other, before a run: a function with plain ifs for each subject.

In a message, {KEY} is replaced by the setting, its value and where it comes from; {LABELS} by the setting that gives
images several labels; {LOSSES} by the losses of the task. To find a refusal, search for the name of its setting.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from configs.removed import REMOVED
from configs.schema import AUTO, Config
from configs.tables import METRICS, SOURCES, TASKS, names_with
from configs.values import SETTINGS, to_text
from utils.commands import page
from utils.errors import ConfigError
from utils.text import is_url, problem_of

Origins = Mapping[str, str]  # {full key: where the value was set}
Refuse = Callable[[str], NoReturn]  # raises ConfigError with a message

# Properties of a run that -resume compares with the checkpoint, in addition to the settings.
NO_SETTINGS = ("GLOBAL_BATCH", "NUM_IMAGES", "IMAGES", "CLASS_NAMES", "SPLIT", "AUGMENTATION")
CHANGEABLE = (*SETTINGS, *REMOVED, *NO_SETTINGS)
IN_THEIR_ORDER = names_with(SOURCES, "in_order")  # values of DATA.DATASET that are read in file order
WITHOUT_FILES = names_with(SOURCES, "has_files", False)  # values of DATA.DATASET that read no files
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
MAX_WEIGHTS = 1e11  # maximum number of weights in all blocks: about five times the largest ViT so far


def check_settings(values: Mapping[str, Any], config: Config, origins: Origins) -> None:
    """Raise ConfigError if settings contradict each other. `values`: {full key: value}."""

    def named(match: re.Match) -> str:
        key = match[1]
        if key == "LOSSES":
            return " or ".join(config.task.losses)
        if key == "LABELS":
            key = "DATA.LABEL_SEPARATOR" if config.DATA.LABEL_SEPARATOR else "DATA.COLUMNS"
        return f"{key}, {to_text(values[key])} ({origins[key]}),"

    def refuse(message: str) -> NoReturn:
        raise ConfigError(re.sub(r"\{([A-Z_.]+)\}", named, message))

    check_url(config.DATA.DATA_PATH, config.DATA.DATASET, origins)
    check_task(config, origins, refuse)
    check_empty_values(config, origins, refuse)
    check_values_without_effect(config, origins, refuse)
    check_step(config, refuse)
    check_data(config, refuse)
    check_model(config, refuse)
    if config.DATA.is_native:
        from configs.rare_checks import check_native_pixels

        check_native_pixels(config, refuse)
    if config.DIST.STRATEGY == "fsdp2":
        from configs.rare_checks import check_sharding

        check_sharding(config, refuse)


def is_typed(key: str, origins: Origins) -> bool:
    """Return whether the setting comes from the command line."""
    return origins[key].startswith(("flag ", "-opts"))


def check_url(url: str, dataset: str, origins: Origins) -> None:
    """Refuse an unusable URL. The message does not quote the URL, because it may contain credentials."""
    if not is_url(url):
        return
    origin = f"DATA.DATA_PATH ({origins['DATA.DATA_PATH']})"
    if problem := problem_of(url):
        raise ConfigError(f"{origin}: the URL {problem}")
    if dataset != "shards":
        raise ConfigError(f"{origin}: only -dataset shards can be read from a server, not {dataset}; {url}")


def check_task(c: Config, origins: Origins, refuse: Refuse) -> None:
    """Refuse settings that contradict what the model learns."""
    if c.task_name == "labels":
        from configs.rare_checks import check_labels

        check_labels(c, refuse)
    elif not c.task.has_classes:
        from configs.rare_checks import check_numbers

        check_numbers(c, is_typed("TRAIN.SMOOTHING", origins), refuse)
    metric, task = c.TRAIN.BEST_METRIC, c.task
    if metric not in task.metrics:
        remedy = METRICS[metric].remedy
        if remedy and c.TRAIN.OBJECTIVE == Config().TRAIN.OBJECTIVE:
            refuse(f"{{TRAIN.BEST_METRIC}} {remedy}")
        refuse(f"{{TRAIN.BEST_METRIC}} is no score of {{TRAIN.OBJECTIVE}} whose scores are {', '.join(task.metrics)}")
    if c.TRAIN.LOSS not in task.losses:
        other = next(name for name, row in TASKS.items() if c.TRAIN.LOSS in row.losses)
        refuse(f"{{TRAIN.LOSS}} is a loss of {other}; set TRAIN.OBJECTIVE={other} (docs/{other}.md), or leave it out")


def check_empty_values(c: Config, origins: Origins, refuse: Refuse) -> None:
    """Refuse empty values, which probably come from unset shell variables, even if a script wrote them to a file."""
    if origins["SAVE"] != "default" and not c.SAVE.strip():
        refuse("{SAVE} is empty, perhaps because a shell variable is not set; name a folder, or leave SAVE out")
    # In a file the path may be empty, because users give it with the flag.
    if origins["DATA.DATA_PATH"].startswith("flag ") and not c.DATA.DATA_PATH.strip():
        refuse(
            "{DATA.DATA_PATH} is empty, perhaps because a shell variable is not set; name a folder, or leave "
            "-data_path out"
        )
    if origins["NAME"] != "default" and not c.NAME.strip() and c.MODEL.RESUME == AUTO:
        refuse(
            "{NAME} is empty, perhaps because a shell variable is not set; -resume auto would resume any run; name a "
            "run, or leave NAME out"
        )


def check_values_without_effect(c: Config, origins: Origins, refuse: Refuse) -> None:
    """Refuse values from the command line that would have no effect."""
    if is_typed("DATA.DATA_PATH", origins) and c.DATA.DATASET in WITHOUT_FILES:
        refuse(
            "{DATA.DATA_PATH} is not read by {DATA.DATASET} which reads no files; add -dataset imagefolder "
            f"({page('docs/data.md')} lists all data sets)"
        )
    if c.MODEL.TYPE == "vit" and origins["MODEL.NAME"] == "-opts" and origins["MODEL.TYPE"] != "-opts":
        refuse(
            "{MODEL.NAME} is only a label, because with {MODEL.TYPE} other settings define the model; add "
            "MODEL.TYPE=timm to train timm's model of this name, or MODEL.TYPE=vit to keep the label"
        )


def check_step(c: Config, refuse: Refuse) -> None:
    """Refuse settings of the training step."""
    precision, train = c.PRECISION, c.TRAIN
    highest = precision.MAX_LOSS_SCALING or math.inf
    if not precision.MIN_LOSS_SCALING <= precision.INIT_LOSS_SCALING <= highest:
        refuse(
            "{PRECISION.INIT_LOSS_SCALING} must be between {PRECISION.MIN_LOSS_SCALING} and "
            "{PRECISION.MAX_LOSS_SCALING} inclusive"
        )
    if precision.MODE == "float8" and precision.DTYPE == "float16":
        refuse("{PRECISION.DTYPE} must be bfloat16 or not set with {PRECISION.MODE} whose other layers use bfloat16")
    if train.BUDGET and train.SIZE_SCHEDULE:
        refuse(
            "{TRAIN.SIZE_SCHEDULE} names an epoch, but {TRAIN.BUDGET} chooses the number of epochs; leave one of them "
            "out"
        )
    if train.SIZE_SCHEDULE and isinstance(c.DATA.IMAGE_SIZE, str):
        refuse("{TRAIN.SIZE_SCHEDULE} has squares, but {DATA.IMAGE_SIZE} is not square; leave the schedule out")
    if train.BUDGET and train.MIXUP_OFF_EPOCH:
        refuse(
            "{TRAIN.MIXUP_OFF_EPOCH} names an epoch, but {TRAIN.BUDGET} chooses the number of epochs; leave one of "
            "them out"
        )
    if train.DISTILLATION_TYPE != "none" and train.TEACHER_MODEL is None and not c.EVAL:
        refuse(
            "{TRAIN.TEACHER_MODEL} must name a timm model or a checkpoint, because of {TRAIN.DISTILLATION_TYPE} which "
            "learns from it"
        )
    if c.MODEL.FREEZE and c.MODEL.LORA.RANK:
        refuse(
            "{MODEL.FREEZE} must be empty with {MODEL.LORA.RANK} because only the adapters and the classifier are "
            "trained"
        )
    if c.COMPILE in CUDA_GRAPH_MODES and train.ACCUM_ITER > 1:  # https://github.com/pytorch/pytorch/issues/169545
        refuse(
            "{COMPILE} must be true, blocks or max-autotune-no-cudagraphs with {TRAIN.ACCUM_ITER} because CUDA graphs "
            "overwrite gradients of the previous micro-batch"
        )
    if not {*c.RESUME.ALLOW_CHANGED} <= {*CHANGEABLE}:
        refuse(f"{{RESUME.ALLOW_CHANGED}} must contain only names of settings, or {', '.join(NO_SETTINGS)}")


def check_data(c: Config, refuse: Refuse) -> None:
    """Refuse settings of the images and of their targets."""
    data = c.DATA
    if len(data.IMAGENET_MEAN) != data.IMAGE_CHANNELS:
        refuse("{DATA.IMAGENET_MEAN} must have one number for each channel, as {DATA.IMAGE_CHANNELS} says")
    if len(data.IMAGENET_STD) != data.IMAGE_CHANNELS:
        refuse("{DATA.IMAGENET_STD} must have one number for each channel, as {DATA.IMAGE_CHANNELS} says")
    if data.BATCH_SIZE != AUTO and data.BATCH_SIZE % 2 and c.TRAIN.mixes and not c.EVAL:
        refuse("{DATA.BATCH_SIZE} must be even, because mixup or cutmix mixes images in pairs")
    if data.SAMPLER == "balanced" and data.DATASET in IN_THEIR_ORDER:
        refuse(
            "{DATA.SAMPLER} must be shuffle with {DATA.DATASET} whose images are read in the order of its files; set "
            "TRAIN.CLASS_WEIGHTS=auto (-opts) to weight the classes instead"
        )
    if not data.is_native and data.IMAGE_CHANNELS not in (1, 3):
        refuse(
            "{DATA.IMAGE_CHANNELS} must be 1 or 3 with {DATA.PIXELS} which reads colours; set DATA.PIXELS=native "
            "(-opts) for other channels"
        )
    if data.DATASET == "shards" and data.COLUMNS and c.task.noun == "class":
        refuse("{DATA.COLUMNS} has no effect with {DATA.DATASET} whose labels are class numbers; leave it out")
    if len(data.TARGET_MEAN) != len(data.TARGET_STD):
        refuse("{DATA.TARGET_MEAN} must have as many numbers as {DATA.TARGET_STD} one of each for each column")
    if data.LABEL_SEPARATOR and len(data.COLUMNS) > 2:
        refuse("{DATA.COLUMNS} must name two columns with {DATA.LABEL_SEPARATOR} one of paths and one of classes")


def check_model(c: Config, refuse: Refuse) -> None:
    """Refuse settings of a ViT whose layers would not fit together, or not into memory."""
    model = c.MODEL
    if model.TYPE != "vit":
        return
    if model.EMBED_DIM % model.NUM_HEADS:
        refuse("{MODEL.EMBED_DIM} must be a multiple of {MODEL.NUM_HEADS} so change one of them")
    if model.PATCH_SIZE > min(c.DATA.shape):
        refuse("{MODEL.PATCH_SIZE} must not be larger than {DATA.IMAGE_SIZE} the side of the images")
    # Queries, keys, values, projection and the MLP's two layers. If the weights exceed the memory, the system may kill
    # the program without a message.
    num_weights = model.DEPTH * model.EMBED_DIM**2 * (4 + 2 * model.MLP_RATIO)
    if num_weights > MAX_WEIGHTS:
        refuse(f"{{MODEL.EMBED_DIM}} gives more than {MAX_WEIGHTS:g} weights with {{MODEL.DEPTH}} so lower one of them")
