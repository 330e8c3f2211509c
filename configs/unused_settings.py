"""Settings that have no effect because of other settings; a run names them in one line each when it starts."""

from collections.abc import Iterator
from typing import Any

from configs.schema import Config
from configs.values import SETTINGS, flatten, to_text
from utils.text import is_url

OF_SCHEDULES = {  # settings of TRAIN.LR_SCHEDULER: the schedules that read them
    "MILESTONES DECAY_EPOCHS DECAY_RATE": ("step",),
    "DECAY_FRACTION DECAY_SHAPE": ("wsd",),
    "AFTER_WARMUP": ("cosine", "paddlevit"),
    "COOLDOWN_EPOCHS": ("cosine", "paddlevit", "wsd"),
}


def unused_settings(config: Config) -> list[str]:
    """A line for each rule that applies to this run, naming its settings that differ from their defaults."""
    values, lines = flatten(config), []
    for applies, section, names, reason in _rules(config):
        keys = [section + name for name in names.split()]
        changed = [f"{key} {to_text(values[key])}" for key in keys if values[key] != _default(key)]
        if applies and changed:
            lines.append(f"note: without effect: {', '.join(changed)}, because {reason}")
    return lines


def _rules(config: Config) -> Iterator[tuple[bool, str, str, str]]:
    """(whether it applies, section, names of the settings without effect, reason)."""
    precision, data, train = config.PRECISION, config.DATA, config.TRAIN
    half = "DTYPE MODE RESIDUAL REDUCE CUSTOM_BLACK_LIST CUSTOM_WHITE_LIST SHADOW_STEPS"
    yield not config.AMP, "PRECISION.", half, "AMP is off; -amp switches it on"
    is_naive = config.AMP and precision.MODE == "naive"
    yield is_naive, "PRECISION.", "RESIDUAL REDUCE", "PRECISION.MODE naive computes everything in half precision"

    yield bool(config.START.NAME), "", "TAG", "NAME is the whole name of the run's folder"
    yield config.START.EVAL, "", "COMPILE", "EVAL is on, and nothing is trained"
    yield config.START.EVAL, "DIST.", "STRATEGY", "EVAL is on, and nothing is trained"

    on_server = is_url(data.DATA_PATH)
    # Of these the index may lie in CACHE_PATH too.
    has_index = data.DATASET in ("imagenet2012", "imagefolder", "csv", "shards", "parquet")
    cache = f"CACHE_SIDE{'' if has_index else ' CACHE_PATH'}"
    yield data.CACHE == "none", "DATA.", cache, "DATA.CACHE is none; set it to disk"
    yield not on_server, "DATA.", "REMOTE_CACHE_GB REMOTE_PATIENCE", "DATA.DATA_PATH is not the URL of a server"
    yield not config.MODEL.LORA.RANK, "MODEL.LORA.", "ALPHA DROPOUT TARGETS", "MODEL.LORA.RANK is 0"
    in_sequence, has_columns = data.DATASET in ("shards", "parquet"), data.DATASET in ("csv", "parquet")
    yield not in_sequence, "DATA.", "SHUFFLE_BUFFER", "DATA.DATASET is not shards or parquet"
    yield not has_columns, "DATA.", "COLUMNS", "DATA.DATASET is not csv or parquet"
    yield data.DATASET != "csv", "DATA.", "GROUP_BY", "DATA.DATASET is not csv"
    is_computed = data.DATASET in ("synthetic", "fractals")
    yield not is_computed, "DATA.", "SYNTHETIC_SIZE", "DATA.DATASET is not synthetic or fractals"

    yield data.FOLD is not None, "DATA.", "VAL_FRACTION", "DATA.FOLD divides the images instead"

    in_memory = data.DATASET in ("digits", "cifar10", "cifar100", "synthetic", "fractals")
    yield in_memory, "DATA.", "EXIF MAX_PIXELS", f"the images of {data.DATASET} are no files"

    yield not train.augments, "DATA.", "AUGMENT_ON", "TRAIN sets no policy and no colour jitter"
    teacher = "DISTILLATION_ALPHA DISTILLATION_TAU TEACHER_MODEL TEACHER_PRETRAINED"
    yield train.DISTILLATION_TYPE == "none", "TRAIN.", teacher, "TRAIN.DISTILLATION_TYPE is none"
    is_hard = train.DISTILLATION_TYPE == "hard"
    yield is_hard, "TRAIN.", "DISTILLATION_TAU", "TRAIN.DISTILLATION_TYPE is hard"
    is_all = train.DISTILLATION_TYPE != "none" and train.DISTILLATION_ALPHA == 1
    labels = "LOSS CLASS_WEIGHTS SMOOTHING BCE_TARGET_THRESH BCE_POS_WEIGHT"
    yield is_all, "TRAIN.", labels, "TRAIN.DISTILLATION_ALPHA is 1: only the teacher counts"
    is_none = train.DISTILLATION_TYPE != "none" and not train.DISTILLATION_ALPHA
    yield is_none, "TRAIN.", "DISTILLATION_TYPE", "TRAIN.DISTILLATION_ALPHA is 0"
    rand_augment = "RAND_AUGMENT_LAYERS RAND_AUGMENT_MAGNITUDE"
    yield not train.RAND_AUGMENT, "TRAIN.", rand_augment, "TRAIN.RAND_AUGMENT is off"
    yield train.RAND_AUGMENT, "TRAIN.", "AUTO_AUGMENT", "TRAIN.RAND_AUGMENT replaces it"
    mixing = "MIXUP_PROB MIXUP_SWITCH_PROB MIXUP_MODE MIXUP_GROUP MIXUP_OFF_EPOCH"
    yield not train.mixes, "TRAIN.", mixing, "TRAIN.MIXUP_ALPHA and TRAIN.CUTMIX_ALPHA are 0"
    is_single = train.mixes and train.MIXUP_MODE != "batch"
    yield is_single, "TRAIN.", "MIXUP_GROUP", "TRAIN.MIXUP_MODE is not batch"
    erasing = "RANDOM_ERASE_MODE RANDOM_ERASE_COUNT"
    yield not train.RANDOM_ERASE_PROB, "TRAIN.", erasing, "TRAIN.RANDOM_ERASE_PROB is 0"
    is_late = (train.EARLY_STOP or 0) * config.VALIDATE_FREQ >= train.NUM_EPOCHS
    too_few = "TRAIN.NUM_EPOCHS and VALIDATE_FREQ leave no more evaluations than that"
    yield is_late, "TRAIN.", "EARLY_STOP", too_few
    binary = "BCE_TARGET_THRESH BCE_POS_WEIGHT"
    yield train.LOSS != "bce", "TRAIN.", binary, "TRAIN.LOSS is not bce"
    yield not train.MODEL_EMA, "TRAIN.", "MODEL_EMA_DECAY MODEL_EMA_WARMUP", "TRAIN.MODEL_EMA is off"
    yield not train.GRAD_CLIP, "TRAIN.", "CLIP_MODE", "TRAIN.GRAD_CLIP is not set"
    yield not train.LINEAR_SCALED_LR, "TRAIN.", "LR_SCALING", "TRAIN.LINEAR_SCALED_LR is not set"
    optimizer = train.OPTIMIZER.NAME
    yield optimizer == "SGD", "TRAIN.OPTIMIZER.", "EPS BETAS", "TRAIN.OPTIMIZER.NAME is SGD"
    is_adam = optimizer in ("AdamW", "Adam")
    yield is_adam, "TRAIN.OPTIMIZER.", "MOMENTUM", f"TRAIN.OPTIMIZER.NAME is {optimizer}"
    kind = train.LR_SCHEDULER.NAME
    for names, kinds in OF_SCHEDULES.items():
        yield kind not in kinds, "TRAIN.LR_SCHEDULER.", names, f"TRAIN.LR_SCHEDULER.NAME is not {' or '.join(kinds)}"
    first_decay = min(train.LR_SCHEDULER.MILESTONES, default=train.LR_SCHEDULER.DECAY_EPOCHS)
    is_late = kind == "step" and first_decay >= train.NUM_EPOCHS
    reason = f"the first decay, after epoch {first_decay}, is not before the end; set MILESTONES or DECAY_EPOCHS"
    yield is_late, "TRAIN.LR_SCHEDULER.", "NAME", reason
    is_constant = kind == "constant" and not train.WARMUP_EPOCHS
    yield is_constant, "TRAIN.LR_SCHEDULER.", "PER_EPOCH", "TRAIN.LR_SCHEDULER.NAME is constant, without a warm-up"
    yield kind == "paddlevit", "TRAIN.LR_SCHEDULER.", "PER_EPOCH", "paddlevit changes the rate once per epoch anyway"
    yield kind in ("constant", "step"), "TRAIN.", "END_LR", f"TRAIN.LR_SCHEDULER.NAME is {kind}"


def _default(key: str) -> Any:
    """The default as `flatten` writes it."""
    default = SETTINGS[key].default
    return list(default) if isinstance(default, tuple) else default
