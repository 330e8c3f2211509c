"""Settings of earlier versions that are gone: the one value that still loads, and what to do instead of the others."""

from configs.values import Text, quoted
from utils.errors import ConfigError

# {key: (its former default, which is what every run does now; what to do instead)}
REMOVED = {
    "TRAIN.OPTIMIZER.FIRST_MOMENT": (
        "float32",
        "the optimizer's state is always float32; to save memory use DIST.STRATEGY=fsdp2, TRAIN.GRAD_CHECKPOINTING=true"
        " or a smaller -batch_size with a larger -accum_iter",
    ),
}


def check_removed(key: str, text: Text, origin: str) -> None:
    """Refuse a removed key with any value but its former default."""
    accepted, remedy = REMOVED[key]
    if text != accepted:
        raise ConfigError(
            f"{origin}: {key} is {quoted(text)}, but this setting was removed; {remedy}, and remove this line"
        )
