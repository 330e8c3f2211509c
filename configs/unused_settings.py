"""Settings that are set but change nothing, because of other settings: told in one line each at the start of a run."""

from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import Config
from configs.values import SETTINGS, flatten, to_text


@dataclass(frozen=True)
class Idle:
    """Settings that have no effect when `holds` is true of a run."""

    keys: str  # separated by blanks, below `section`
    why: str
    holds: Callable[[Config], bool]
    section: str = ""


TABLE = (
    Idle(
        "DTYPE MODE RESIDUAL REDUCE CUSTOM_BLACK_LIST CUSTOM_WHITE_LIST SHADOW_STEPS",
        "AMP is off; -amp switches it on",
        lambda config: not config.AMP,
        "PRECISION.",
    ),
    Idle(
        "RESIDUAL REDUCE",
        "with PRECISION.MODE naive all is in half",
        lambda config: config.AMP and config.PRECISION.MODE == "naive",
        "PRECISION.",
    ),
    Idle(
        "SHADOW_COSINE SHADOW_LOSS",
        "PRECISION.SHADOW_STEPS is not set",
        lambda config: not config.PRECISION.SHADOW_STEPS,
        "PRECISION.",
    ),
    Idle("PROFILE COMPILE", "they are about training, and EVAL is on", lambda config: config.EVAL),
    Idle("STRATEGY CHECKPOINT", "they are about training, and EVAL is on", lambda config: config.EVAL, "DIST."),
    Idle("COMPILE_SCOPE COMPILE_MODE", "COMPILE is off; -compile switches it on", lambda config: not config.COMPILE),
    Idle(
        "CACHE_FORM CACHE_SIDE CACHE_QUALITY CACHE_PATH",
        "DATA.CACHE is none; set it to disk or ram",
        lambda config: config.DATA.CACHE == "none",
        "DATA.",
    ),
    Idle(
        "CACHE_QUALITY",
        "DATA.CACHE_FORM is decoded; set it to jpeg",
        lambda config: config.DATA.CACHE != "none" and config.DATA.CACHE_FORM == "decoded",
        "DATA.",
    ),
    Idle("CACHE_PATH", "DATA.CACHE is ram", lambda config: config.DATA.CACHE == "ram", "DATA."),
    Idle(
        "SHUFFLE_BUFFER CUT_SHARDS",
        "DATA.DATASET is not shards",
        lambda config: config.DATA.DATASET != "shards",
        "DATA.",
    ),
    Idle(
        "SYNTHETIC_SIZE",
        "DATA.DATASET is not synthetic",
        lambda config: config.DATA.DATASET != "synthetic",
        "DATA.",
    ),
    Idle(
        "RAND_AUGMENT_LAYERS RAND_AUGMENT_MAGNITUDE",
        "TRAIN.RAND_AUGMENT is off",
        lambda config: not config.TRAIN.RAND_AUGMENT,
        "TRAIN.",
    ),
    Idle("AUTO_AUGMENT", "TRAIN.RAND_AUGMENT takes its place", lambda config: config.TRAIN.RAND_AUGMENT, "TRAIN."),
    Idle(
        "MIXUP_PROB MIXUP_SWITCH_PROB MIXUP_MODE MIXUP_OFF_EPOCH",
        "TRAIN.MIXUP_ALPHA and TRAIN.CUTMIX_ALPHA are 0",
        lambda config: not config.TRAIN.mixes,
        "TRAIN.",
    ),
    Idle(
        "RANDOM_ERASE_MODE RANDOM_ERASE_COUNT",
        "TRAIN.RANDOM_ERASE_PROB is 0",
        lambda config: not config.TRAIN.RANDOM_ERASE_PROB,
        "TRAIN.",
    ),
    Idle("MODEL_EMA_DECAY", "TRAIN.MODEL_EMA is off", lambda config: not config.TRAIN.MODEL_EMA, "TRAIN."),
    Idle(
        "MILESTONES DECAY_EPOCHS DECAY_RATE",
        "TRAIN.LR_SCHEDULER.NAME is not step",
        lambda config: config.TRAIN.LR_SCHEDULER.NAME != "step",
        "TRAIN.LR_SCHEDULER.",
    ),
)


def idle_settings(config: Config) -> list[str]:
    """A line for each row of the table that concerns this run. What has its default value is not spoken of."""
    values, lines = flatten(config), []
    for row in TABLE:
        keys = [row.section + name for name in row.keys.split()]
        changed = [f"{key} {to_text(values[key])}" for key in keys if values[key] != default_of(key)]
        if changed and row.holds(config):
            lines.append(f"note: without effect: {', '.join(changed)}, as {row.why}")
    return lines


def default_of(key: str):
    """As `flatten` gives it."""
    default = SETTINGS[key].default
    return list(default) if isinstance(default, tuple) else default
