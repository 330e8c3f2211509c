"""Which optimizers there are besides our three: timm's and the package schedulefree's; refuses those that cannot train here."""

import inspect
from collections.abc import Callable
from typing import NoReturn

from configs.schema import Config, Optimizer
from utils.errors import ConfigError, did_you_mean

KEY = "TRAIN.OPTIMIZER"
OURS = ("AdamW", "Adam", "SGD")  # torch's fused ones
SCHEDULE_FREE = {name.lower(): name for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")}
# What build_optimizer passes or what decides how a step is computed; the settings are the way to these.
TAKEN = {
    "params": None,
    "lr": "TRAIN.BASE_LR",
    "weight_decay": "TRAIN.WEIGHT_DECAY",
    "warmup_steps": "TRAIN.WARMUP_EPOCHS",
}
NOT_TAKEN = ("fused", "capturable", "differentiable", "foreach", "maximize", "deterministic")
# Each number of these changes by its own gradients alone, so a process can update its rows of a weight. The others take
# norms or means over whole weights.
BY_ELEMENT = """adabelief adadelta adagrad adamax adamc adamwlegacy adan adanw adopt adoptc adoptw laprop lapropc lion lionc
madgrad madgradw momentum nadam nadamc nadamlegacy nadamw nesterov nesterovw radabelief radam radamlegacy radamw rmsprop
rmsproptf rmsproptfc rmsproptfw sgdc sgdw""".split()
NEEDS = {"bnb": "bitsandbytes", "fused": "apex"}


def check_optimizer(config: Config) -> None:
    """Refuse an optimizer that there is not, or that cannot do what the other settings ask for."""
    chosen = config.TRAIN.OPTIMIZER
    find_class(chosen)
    check_arguments(chosen)
    name, strategy = chosen.NAME, config.DIST.STRATEGY
    if strategy == "fsdp2" and name not in (*OURS, *SCHEDULE_FREE, *BY_ELEMENT):
        raise ConfigError(
            f"{KEY}.NAME is {name} and DIST.STRATEGY is {strategy}, which do not go together: it takes norms or means of "
            "whole weights, of which a process has some rows; use DIST.STRATEGY ddp, or AdamW"
        )
    if name in SCHEDULE_FREE:
        _check_schedule_free(config)


def find_class(chosen: Optimizer) -> Callable:
    """The class of this name; imports timm, which takes seconds, for those that are not ours."""
    import torch

    if chosen.NAME in OURS:
        return getattr(torch.optim, chosen.NAME)
    if chosen.NAME in SCHEDULE_FREE:
        try:
            import schedulefree
        except ImportError:
            _refuse(chosen.NAME, "needs the package schedulefree: pip install schedulefree")
        return getattr(schedulefree, SCHEDULE_FREE[chosen.NAME])
    from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers

    known = list_optimizers()
    if chosen.NAME not in known:
        names = [*OURS, *SCHEDULE_FREE.values(), *known]
        near = did_you_mean(chosen.NAME, [*map(str.lower, names)])
        _refuse(chosen.NAME, f"is none of {', '.join(OURS)}, {', '.join(SCHEDULE_FREE.values())} and timm's{near}")
    if getattr(get_optimizer_info(chosen.NAME), "second_order", False):
        _refuse(chosen.NAME, "needs second derivatives, which are not computed here; lamb and adabelief do not")
    if chosen.NAME.startswith("kron"):
        # Its preconditioners are updated with random numbers of each process, so the weights of processes would part.
        _refuse(chosen.NAME, "is not supported: it draws other random numbers in each process; muon is the nearest")
    try:
        return get_optimizer_class(chosen.NAME, bind_defaults=False)
    except (ImportError, AssertionError):
        package = next(each for start, each in NEEDS.items() if chosen.NAME.startswith(start))
        _refuse(chosen.NAME, f"needs a CUDA device and the package {package}: pip install {package}")


def check_arguments(chosen: Optimizer) -> None:
    """Refuse arguments that the optimizer does not take, and those that have a setting."""
    cls = find_class(chosen)
    taken = inspect.signature(cls).parameters
    for name, value in chosen.KWARGS.items():
        key = f"{KEY}.KWARGS.{name}: {value!r}"
        if setting := TAKEN.get(name):
            raise ConfigError(f"{key}; the setting for it is {setting}, use that instead")
        if name in NOT_TAKEN:
            raise ConfigError(f"{key} is not for the settings to choose; remove it")
        if name not in taken or name == "params":
            offered = [each for each in taken if each not in (*TAKEN, *NOT_TAKEN)]
            near = did_you_mean(name, offered) or f"; it has {', '.join(offered)}"
            raise ConfigError(f"{KEY}.KWARGS.{name}: {cls.__name__} has no such argument{near}")
    for name in changed_arguments(chosen):
        if name not in taken:
            raise ConfigError(f"{KEY}.{name.upper()}: {cls.__name__} has no such argument; remove the setting")


def changed_arguments(chosen: Optimizer) -> dict:
    """The arguments that have settings, where these are not at their defaults: other optimizers have defaults of their own."""
    default = Optimizer()
    return {
        name.lower(): getattr(chosen, name)
        for name in ("EPS", "BETAS", "MOMENTUM")
        if chosen.NAME not in OURS and getattr(chosen, name) != getattr(default, name)
    }


def _check_schedule_free(config: Config) -> None:
    name, train = f"{KEY}.NAME is {config.TRAIN.OPTIMIZER.NAME}", config.TRAIN
    if train.LR_SCHEDULER.NAME != "constant":
        raise ConfigError(
            f"TRAIN.LR_SCHEDULER.NAME is {train.LR_SCHEDULER.NAME}, but {name}, which takes the place of a schedule: "
            "set TRAIN.LR_SCHEDULER.NAME=constant; the warm-up stays"
        )
    if train.MODEL_EMA:
        raise ConfigError(f"TRAIN.MODEL_EMA is true, but {name}, which averages the weights itself; set it to false")


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(f"{KEY}.NAME: {name} {why}")
