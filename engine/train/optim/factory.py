"""Builds the optimizer of the settings."""

import contextlib
import inspect
from dataclasses import replace

import torch
from torch import nn

from configs.schema import Train
from engine.train.optim.groups import parameter_groups
from engine.train.optim.names import KEY, OURS, SCHEDULE_FREE, changed_arguments, find_class
from engine.train.optim.schedule_free import ScheduleFreeOptimizer
from engine.train.optim.skipping import SkippingOptimizer
from models.parts import has_running_statistics
from utils.errors import ConfigError
from utils.torch_internals import tree_leaves

AnyOptimizer = torch.optim.Optimizer | SkippingOptimizer


def build_optimizer(
    settings: Train, model: nn.Module, own: dict[str, nn.Parameter] | None = None, peak: float | None = None
) -> AnyOptimizer:
    """The optimizer of all trainable parameters; it can skip an update on the device.

    `own`: this process's part of each parameter, if they are sharded. `peak`: the highest rate of the run, which some
    optimizers scale the weight decay by; if not given, TRAIN.BASE_LR.
    """
    own = dict(model.named_parameters()) if own is None else own
    groups = parameter_groups(settings, model, own)
    if settings.OPTIMIZER.NAME not in OURS:
        return _build_other(settings, model, groups, settings.BASE_LR if peak is None else peak)
    # On MPS the fused kernels of older versions of torch ignore found_inf and grad_scale, so no update would be skipped.
    is_fused = next(iter(own.values())).device.type != "mps"
    optimizer = _build_ours(settings, groups, is_fused)
    return optimizer if is_fused else SkippingOptimizer(optimizer)


def _build_ours(settings: Train, groups: list[dict], is_fused: bool) -> torch.optim.Optimizer:
    """torch's fused ones: faster, and their kernels skip an update."""
    chosen = settings.OPTIMIZER
    cls, common = find_class(chosen), {"lr": settings.BASE_LR, "fused": is_fused}
    with _refusing(settings):
        if chosen.NAME != "SGD":
            return cls(groups, **{"betas": chosen.BETAS, "eps": chosen.EPS} | common | dict(chosen.KWARGS))
        optimizer = cls(groups, **{"momentum": chosen.MOMENTUM} | common | dict(chosen.KWARGS))
    if optimizer.defaults["momentum"]:
        for parameter in [each for group in groups for each in group["params"]]:
            # torch allocates it in the first update, and leaves it uninitialised if that one is skipped.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _build_other(settings: Train, model: nn.Module, groups: list[dict], peak: float) -> SkippingOptimizer:
    chosen = settings.OPTIMIZER
    arguments = {"lr": peak} | changed_arguments(chosen) | dict(chosen.KWARGS)
    with _refusing(settings):
        if chosen.NAME in SCHEDULE_FREE:
            if any(has_running_statistics(module) for module in model.modules()):
                raise ConfigError(
                    f"{KEY}.NAME is {chosen.NAME}, but the model has BatchNorm, whose running statistics are of other weights "
                    "than those that are evaluated; use another optimizer"
                )
            return ScheduleFreeOptimizer(find_class(chosen)(groups, **arguments))
        from timm.optim import create_optimizer_v2  # local: importing timm takes seconds

        return SkippingOptimizer(create_optimizer_v2(groups, opt=chosen.NAME, **arguments))


def numbers_per_weight(settings: Train) -> float:
    """What the optimizer keeps for each weight of a matrix, found by a step of a small one; schedulefree also saves the weight."""
    weight = nn.Parameter(torch.zeros(64, 64))  # no random number is drawn
    weight.grad = torch.zeros_like(weight)
    optimizer = build_optimizer(replace(settings, LAYER_DECAY=None), nn.ParameterList([weight]))
    with _refusing(settings):  # timm's constructors check few values
        optimizer.step(*[torch.zeros(())] * isinstance(optimizer, SkippingOptimizer))
    kept = sum(
        each.numel() for each in tree_leaves(dict(optimizer.state)) if isinstance(each, torch.Tensor) and each.ndim
    )
    return kept / weight.numel() + (settings.OPTIMIZER.NAME in SCHEDULE_FREE)


def load_state(optimizer: AnyOptimizer, state: dict) -> None:
    """Load a saved optimizer; refuse one of other parameter groups, which torch tells apart by number and size alone."""
    then, now = (
        [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    if then != now:
        raise ConfigError(
            f"-resume: the optimizer of the checkpoint has {len(then)} groups of {then} parameters, this run {len(now)} of "
            f"{now}; put back what decides on them (TRAIN.LAYER_DECAY, TRAIN.WEIGHT_DECAY_EXCLUDE_1D, MODEL.FREEZE), or "
            "start a new run from its weights with -pretrained"
        )
    # torch takes the arguments of the saved groups; those of the settings count, where they were allowed to change.
    arguments = {"lr_scale", *inspect.signature(type(getattr(optimizer, "inner", optimizer))).parameters} - {
        "params",
        "lr",
    }
    own = [{name: group[name] for name in arguments & group.keys()} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, mine in zip(optimizer.param_groups, own, strict=True):
        group.update(mine)


@contextlib.contextmanager
def _refusing(settings: Train):
    """A failure of the constructor or of a first step is the user's mistake if it got arguments from the settings."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        chosen = settings.OPTIMIZER
        values = ", ".join(
            f"{name} {value!r}" for name, value in (changed_arguments(chosen) | dict(chosen.KWARGS)).items()
        )
        if not values:
            raise
        first_line = str(error).split("\n")[0]
        raise ConfigError(
            f"{KEY}.KWARGS: {chosen.NAME} does not work with {values} ({type(error).__name__}: {first_line})"
        ) from None
