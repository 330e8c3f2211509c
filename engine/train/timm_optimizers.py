"""Builds timm's optimizers by name, and refuses those that halfstep does not support."""

from collections.abc import Callable
from typing import NoReturn

import torch

from configs.schema import Train
from engine.train.optimizer_arguments import KEY, OURS, refusing_arguments, set_arguments
from utils.commands import pip
from utils.errors import ConfigError, did_you_mean
from utils.torch_internals import import_timm

# These optimizers update each element of a weight only from the gradients of that element, so a process can update its
# rows of a weight separately. The other optimizers compute norms or means over whole weights.
BY_ELEMENT = """
adabelief adadelta adagrad adamax adamc adamwlegacy adan adanw adopt adoptc adoptw laprop lapropc lion lionc madgrad
madgradw momentum nadam nadamc nadamlegacy nadamw nesterov nesterovw radabelief radam radamlegacy radamw rmsprop
rmsproptf rmsproptfc rmsproptfw sgdc sgdw
""".split()
PACKAGES = {"bnb": "bitsandbytes", "fused": "apex"}  # {start of an optimizer's name: package that it needs}


def build_timms(settings: Train, groups: list[dict], peak: float) -> torch.optim.Optimizer:
    """Return the optimizer of timm that the settings name. `peak`: the highest learning rate of the run."""
    chosen = settings.OPTIMIZER
    find_timms(chosen.NAME)  # refuses an unknown name
    arguments = {"lr": peak} | set_arguments(chosen) | dict(chosen.KWARGS)
    with refusing_arguments(settings):
        from timm.optim import create_optimizer_v2  # local: importing timm takes seconds

        return create_optimizer_v2(groups, opt=chosen.NAME, **arguments)


def find_timms(name: str) -> Callable:
    """Return timm's optimizer class of this name. Importing timm takes seconds."""
    import_timm()
    from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers

    known = list_optimizers()
    if name not in known:
        near = did_you_mean(name, [*map(str.lower, OURS), *known])
        _refuse(name, f"is not among {', '.join(OURS)} and timm's optimizers{near}")
    if getattr(get_optimizer_info(name), "second_order", False):
        _refuse(name, "needs second derivatives, which halfstep does not compute; use lamb or adabelief instead")
    if name.startswith("kron"):
        # Each process would update the preconditioners with different random numbers, so their weights would diverge.
        _refuse(name, "is not supported: it draws different random numbers in each process; use muon instead")
    try:
        return get_optimizer_class(name)
    except (ImportError, AssertionError):
        package = next(each for start, each in PACKAGES.items() if name.startswith(start))
        _refuse(name, f"needs a CUDA device and the package {package}: {pip('install')} {package}")


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(f"{KEY}.NAME: {name} {why}")
