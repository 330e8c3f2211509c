"""REFUSED: the combinations of settings that are refused before a run, each as a condition and a message."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from configs.removed import REMOVED
from configs.schema import AUTO, Config
from configs.tables import METRICS, SOURCES, TASKS, names_with
from configs.values import SETTINGS, to_text
from utils.commands import page
from utils.errors import ConfigError
from utils.text import is_url, problem_of

if TYPE_CHECKING:
    from configs.refusals import Refusal

Origins = Mapping[str, str]  # {full key: where the value was set}

# Properties of a run that -resume compares with the checkpoint, in addition to the settings.
NO_SETTINGS = ("GLOBAL_BATCH", "NUM_IMAGES", "IMAGES", "CLASS_NAMES", "SPLIT", "AUGMENTATION")
CHANGEABLE = (*SETTINGS, *REMOVED, *NO_SETTINGS)
IN_THEIR_ORDER = names_with(SOURCES, "in_order")  # values of DATA.DATASET that are read in file order
WITHOUT_FILES = names_with(SOURCES, "has_files", False)  # values of DATA.DATASET that read no files
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
MAX_WEIGHTS = 1e11  # maximum number of weights in all blocks: about five times the largest ViT so far


# {property of the settings: the settings that decide it}
SETTINGS_OF = {
    "TRAIN.cuts": "{TRAIN.CUTMIX_ALPHA} and {TRAIN.CUTMIX_MINMAX}",
}


def check_combinations(values: Mapping[str, Any], config: Config, origins: Origins) -> None:
    """Raise ConfigError if settings are incompatible. `values`: {full key: value}."""

    def named(match: re.Match) -> str:
        key = match[1]
        if key == "LOSSES":
            return " or ".join(config.task.losses)
        if key == "LABELS":  # the setting that gives images several labels
            key = "DATA.LABEL_SEPARATOR" if config.DATA.LABEL_SEPARATOR else "DATA.COLUMNS"
        return f"{key}, {to_text(values[key])} ({origins[key]}),"

    _check_url(config.DATA.DATA_PATH, config.DATA.DATASET, origins)
    refused = REFUSED
    if config.DATA.is_native or config.DIST.STRATEGY == "fsdp2":
        from configs.rare_combinations import refused_with

        refused = (*REFUSED, *refused_with(config))
    wrong = (message for is_wrong, message in refused if is_wrong(config, origins))
    for message in itertools.chain(_refused_by_task(values, config, origins), wrong):
        raise ConfigError(re.sub(r"\{([A-Z_.]+)\}", named, message))


def refusals_of(task: str) -> "tuple[Refusal, ...]":
    """Return the settings that contradict a task or have no effect with it."""
    match task:
        case "labels":
            from configs.refusals import LABELS

            return LABELS
        case "numbers":
            from configs.refusals import NUMBERS

            return NUMBERS
    return ()


def _refused_by_task(values: Mapping[str, Any], config: Config, origins: Origins) -> Iterator[str]:
    """Yield a message for each setting that contradicts what the model learns."""
    task, metric, defaults = config.task, config.TRAIN.BEST_METRIC, Config()
    for rule in refusals_of(config.task_name):
        if rule.if_typed and not is_typed(rule.setting, origins) or rule.only_in_training and config.START.EVAL:
            continue
        value, default = (attrgetter(rule.setting)(settings) for settings in (config, defaults))
        allowed = rule.allowed or task.losses * (rule.setting == "TRAIN.LOSS") or (default,)
        if value not in allowed:
            yield f"{SETTINGS_OF.get(rule.setting, f'{{{rule.setting}}}')} {rule.how}"
    if metric not in task.metrics:
        no_score = f"is no score of {{TRAIN.OBJECTIVE}} whose scores are {', '.join(task.metrics)}"
        remedy = METRICS[metric].remedy if config.TRAIN.OBJECTIVE == defaults.TRAIN.OBJECTIVE else ""
        yield f"{{TRAIN.BEST_METRIC}} {remedy or no_score}"
    if config.TRAIN.LOSS not in task.losses:  # other tasks have refused it above
        other = next(name for name, row in TASKS.items() if config.TRAIN.LOSS in row.losses)
        yield f"{{TRAIN.LOSS}} is a loss of {other}; set TRAIN.OBJECTIVE={other} (docs/{other}.md), or leave it out"


def is_typed(key: str, origins: Origins) -> bool:
    """Return whether the setting comes from the command line."""
    return origins[key].startswith(("flag ", "-opts"))


def _check_url(url: str, dataset: str, origins: Origins) -> None:
    """Refuse an unusable URL. The message does not quote the URL, because it may contain credentials."""
    if not is_url(url):
        return
    origin = f"DATA.DATA_PATH ({origins['DATA.DATA_PATH']})"
    if problem := problem_of(url):
        raise ConfigError(f"{origin}: the URL {problem}")
    if dataset != "shards":
        raise ConfigError(f"{origin}: only -dataset shards can be read from a server, not {dataset}; {url}")


def _num_weights(c: Config) -> float:
    """Return the number of weights in all blocks: queries, keys, values, projection and the MLP's two layers."""
    return c.MODEL.DEPTH * c.MODEL.EMBED_DIM**2 * (4 + 2 * c.MODEL.MLP_RATIO)


# A pair for each refused combination. The condition gets the Config and the origins of its values. In the message,
# {KEY} is replaced by the setting, its value and its origin; {LABELS} by the setting that gives images several labels.
REFUSED: tuple[tuple[Callable[[Config, Origins], Any], str], ...] = (
    # Empty values probably come from unset shell variables, even if a script wrote them to a file.
    (
        lambda c, o: o["SAVE"] != "default" and not c.SAVE.strip(),
        "{SAVE} is empty, perhaps because a shell variable is not set; name a folder, or leave SAVE out",
    ),
    (  # In a file the path may be empty, because users give it with the flag.
        lambda c, o: o["DATA.DATA_PATH"].startswith("flag ") and not c.DATA.DATA_PATH.strip(),
        "{DATA.DATA_PATH} is empty, perhaps because a shell variable is not set; name a folder, or leave -data_path "
        "out",
    ),
    (
        lambda c, o: o["NAME"] != "default" and not c.START.NAME.strip() and c.START.RESUME == AUTO,
        "{NAME} is empty, perhaps because a shell variable is not set; -resume auto would resume any run; name a run, "
        "or leave NAME out",
    ),
    # Values from the command line that would have no effect.
    (
        lambda c, o: is_typed("DATA.DATA_PATH", o) and c.DATA.DATASET in WITHOUT_FILES,
        "{DATA.DATA_PATH} is not read by {DATA.DATASET} which reads no files; add -dataset imagefolder "
        f"({page('docs/data.md')} lists all data sets)",
    ),
    (
        lambda c, o: c.MODEL.TYPE == "vit" and o["MODEL.NAME"] == "-opts" != o["MODEL.TYPE"],
        "{MODEL.NAME} is only a label, because with {MODEL.TYPE} other settings define the model; add MODEL.TYPE=timm "
        "to train timm's model of this name, or MODEL.TYPE=vit to keep the label",
    ),
    # The training step.
    (
        lambda c, o: (
            not c.PRECISION.MIN_LOSS_SCALING
            <= c.PRECISION.INIT_LOSS_SCALING
            <= (c.PRECISION.MAX_LOSS_SCALING or math.inf)
        ),
        "{PRECISION.INIT_LOSS_SCALING} must be between {PRECISION.MIN_LOSS_SCALING} and {PRECISION.MAX_LOSS_SCALING} "
        "inclusive",
    ),
    (
        lambda c, o: c.PRECISION.MODE == "float8" and c.PRECISION.DTYPE == "float16",
        "{PRECISION.DTYPE} must be bfloat16 or not set with {PRECISION.MODE} whose other layers use bfloat16",
    ),
    (
        lambda c, o: c.TRAIN.SIZE_SCHEDULE and c.TRAIN.BUDGET,
        "{TRAIN.SIZE_SCHEDULE} names an epoch, but {TRAIN.BUDGET} chooses the number of epochs; leave one of them out",
    ),
    (
        lambda c, o: c.TRAIN.MIXUP_OFF_EPOCH and c.TRAIN.BUDGET,
        "{TRAIN.MIXUP_OFF_EPOCH} names an epoch, but {TRAIN.BUDGET} chooses the number of epochs; leave one of them "
        "out",
    ),
    (
        lambda c, o: c.TRAIN.DISTILLATION_TYPE != "none" and c.TRAIN.TEACHER_MODEL is None and not c.START.EVAL,
        "{TRAIN.TEACHER_MODEL} must name a timm model or a checkpoint, because of {TRAIN.DISTILLATION_TYPE} which "
        "learns from it",
    ),
    (
        lambda c, o: c.MODEL.FREEZE and c.MODEL.LORA.RANK,
        "{MODEL.FREEZE} must be empty with {MODEL.LORA.RANK} because only the adapters and the classifier are trained",
    ),
    (  # https://github.com/pytorch/pytorch/issues/169545
        lambda c, o: c.COMPILE in CUDA_GRAPH_MODES and c.TRAIN.ACCUM_ITER > 1,
        "{COMPILE} must be true, blocks or max-autotune-no-cudagraphs with {TRAIN.ACCUM_ITER} because CUDA graphs "
        "overwrite gradients of the previous micro-batch",
    ),
    (
        lambda c, o: not {*c.START.ALLOW_CHANGED} <= {*CHANGEABLE},
        f"{{RESUME.ALLOW_CHANGED}} must contain only names of settings, or {', '.join(NO_SETTINGS)}",
    ),
    # Images.
    (
        lambda c, o: len(c.DATA.IMAGENET_MEAN) != c.DATA.IMAGE_CHANNELS,
        "{DATA.IMAGENET_MEAN} must have one number for each channel, as {DATA.IMAGE_CHANNELS} says",
    ),
    (
        lambda c, o: len(c.DATA.IMAGENET_STD) != c.DATA.IMAGE_CHANNELS,
        "{DATA.IMAGENET_STD} must have one number for each channel, as {DATA.IMAGE_CHANNELS} says",
    ),
    (
        lambda c, o: c.DATA.BATCH_SIZE != AUTO and c.DATA.BATCH_SIZE % 2 and c.TRAIN.mixes and not c.START.EVAL,
        "{DATA.BATCH_SIZE} must be even, because mixup or cutmix mixes images in pairs",
    ),
    (
        lambda c, o: c.DATA.SAMPLER == "balanced" and c.DATA.DATASET in IN_THEIR_ORDER,
        "{DATA.SAMPLER} must be shuffle with {DATA.DATASET} whose images are read in the order of its files; set "
        "TRAIN.CLASS_WEIGHTS=auto (-opts) to weight the classes instead",
    ),
    # Images with the values of their files.
    (
        lambda c, o: not c.DATA.is_native and c.DATA.IMAGE_CHANNELS not in (1, 3),
        "{DATA.IMAGE_CHANNELS} must be 1 or 3 with {DATA.PIXELS} which reads colours; set DATA.PIXELS=native (-opts) "
        "for other channels",
    ),
    # Several labels per image, and numbers.
    (
        lambda c, o: c.DATA.DATASET == "shards" and c.DATA.COLUMNS and c.task.noun == "class",
        "{DATA.COLUMNS} has no effect with {DATA.DATASET} whose labels are class numbers; leave it out",
    ),
    (
        lambda c, o: len(c.DATA.TARGET_MEAN) != len(c.DATA.TARGET_STD),
        "{DATA.TARGET_MEAN} must have as many numbers as {DATA.TARGET_STD} one of each for each column",
    ),
    (
        lambda c, o: c.DATA.LABEL_SEPARATOR and len(c.DATA.COLUMNS) > 2,
        "{DATA.COLUMNS} must name two columns with {DATA.LABEL_SEPARATOR} one of paths and one of classes",
    ),
    # The model.
    (
        lambda c, o: c.MODEL.TYPE == "vit" and c.MODEL.EMBED_DIM % c.MODEL.NUM_HEADS,
        "{MODEL.EMBED_DIM} must be a multiple of {MODEL.NUM_HEADS} so change one of them",
    ),
    (
        lambda c, o: c.MODEL.TYPE == "vit" and c.MODEL.PATCH_SIZE > c.DATA.IMAGE_SIZE,
        "{MODEL.PATCH_SIZE} must not be larger than {DATA.IMAGE_SIZE} the side of the images",
    ),
    (  # If the weights exceed the memory, the system may kill the program without a message.
        lambda c, o: c.MODEL.TYPE == "vit" and _num_weights(c) > MAX_WEIGHTS,
        f"{{MODEL.EMBED_DIM}} gives more than {MAX_WEIGHTS:g} weights with {{MODEL.DEPTH}} so lower one of them",
    ),
)
