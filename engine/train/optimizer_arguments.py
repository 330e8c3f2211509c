"""The arguments of an optimizer: those that settings give it, and those that it does not accept."""

import contextlib
import inspect
from collections.abc import Callable, Iterator

from configs.schema import Optimizer, Train
from configs.tables import TORCH_OPTIMIZERS
from utils.errors import ConfigError

KEY = "TRAIN.OPTIMIZER"
OURS = TORCH_OPTIMIZERS  # torch's fused optimizers; all other names are timm's
# Arguments that TRAIN.OPTIMIZER.KWARGS may not set: they have a setting, or they decide how a step is computed.
TAKEN = {"lr": "TRAIN.BASE_LR", "weight_decay": "TRAIN.WEIGHT_DECAY"}
NOT_TAKEN = ("fused", "capturable", "differentiable", "foreach", "maximize", "deterministic")


def check_arguments(chosen: Optimizer, cls: Callable) -> None:
    """Refuse arguments that the optimizer's class does not accept, and arguments that have a setting."""
    offered = inspect.signature(cls).parameters.keys() - {"params"} - TAKEN.keys() - set(NOT_TAKEN)
    typed = {f"{KEY}.KWARGS.{name}": name for name in chosen.KWARGS}
    if chosen.NAME not in OURS:
        typed |= {f"{KEY}.{name.upper()}": name for name in set_arguments(chosen)}
    for key, name in typed.items():
        if setting := TAKEN.get(name):
            raise ConfigError(f"{key}: use the setting {setting} instead")
        if name in NOT_TAKEN:
            raise ConfigError(f"{key}: halfstep sets this argument itself; remove it")
        if name not in offered:
            raise ConfigError(f"{key}: {chosen.NAME} has no such argument; it has {', '.join(sorted(offered))}")


def set_arguments(chosen: Optimizer, *names: str) -> dict:
    """Return {argument: value} for TRAIN.OPTIMIZER.EPS, .BETAS and .MOMENTUM; without values, defaults apply."""
    values = {name: getattr(chosen, name) for name in names or ("EPS", "BETAS", "MOMENTUM")}
    return {name.lower(): value for name, value in values.items() if value not in (None, ())}


@contextlib.contextmanager
def refusing_arguments(settings: Train) -> Iterator[None]:
    """Raise ConfigError if the constructor or a first step fails with arguments from the settings."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        chosen = settings.OPTIMIZER
        arguments = {} if chosen.NAME in OURS else set_arguments(chosen)
        arguments |= dict(chosen.KWARGS)
        values = ", ".join(f"{name} {value!r}" for name, value in arguments.items())
        if not values:
            raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ConfigError(
            f"{KEY}.KWARGS: {chosen.NAME} does not work with {values} ({reason}); change or remove these arguments"
        ) from None
