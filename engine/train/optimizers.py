"""Builds the optimizer, refuses settings with which it cannot train, and loads its saved state."""

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from configs.schema import Config, Optimizer, Train
from configs.tables import TORCH_OPTIMIZERS
from engine.train.optimizer_arguments import KEY, OURS, check_arguments, refusing_arguments, set_arguments
from models.weights.sharded import is_plain
from utils.errors import ConfigError
from utils.torch_internals import tree_leaves, without_compiler


def build_optimizer(
    settings: Train, model: nn.Module, own: dict[str, nn.Parameter] | None = None, peak: float | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that TRAIN.OPTIMIZER.NAME names, for all trainable parameters.

    `own` is this process's part of each parameter if the model is sharded. `peak` is the highest learning rate of the
    run, by which some optimizers scale the weight decay. The default is TRAIN.BASE_LR.
    """
    own = dict(model.named_parameters()) if own is None else own
    groups = parameter_groups(settings, model, own)
    if settings.OPTIMIZER.NAME not in OURS:
        from engine.train.timm_optimizers import build_timms

        return build_timms(settings, groups, settings.BASE_LR if peak is None else peak)
    # On MPS the fused kernels of older torch versions ignore found_inf and grad_scale, so no update would be skipped.
    is_fused = next(iter(own.values())).device.type != "mps"
    chosen = settings.OPTIMIZER
    arguments = {"lr": settings.BASE_LR, "fused": is_fused} | dict(chosen.KWARGS)
    with refusing_arguments(settings):
        row = TORCH_OPTIMIZERS[chosen.NAME]
        optimizer = find_class(chosen)(groups, **row.defaults | set_arguments(chosen, *row.settings) | arguments)
    if optimizer.defaults.get("momentum"):
        for parameter in [each for group in groups for each in group["params"]]:
            # torch would allocate the momentum in the first update, uninitialised if that update is skipped.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameter_groups(settings: Train, model: nn.Module, own: dict[str, nn.Parameter]) -> list[dict]:
    """Return the groups of all trainable parameters, divided as in timm. `own`: this process's part of each parameter.

    With TRAIN.LAYER_DECAY each group has an `lr_scale`, by which its learning rate is multiplied.
    """
    names = getattr(model, "no_weight_decay", set)()
    if settings.LAYER_DECAY is not None:
        from timm.optim import param_groups_layer_decay  # imported here, because importing timm takes seconds

        decays = {"weight_decay": settings.WEIGHT_DECAY, "layer_decay": settings.LAYER_DECAY}
        groups = param_groups_layer_decay(model, no_weight_decay_list=names, **decays)
        parameters = {id(parameter): own[name] for name, parameter in model.named_parameters()}
        return [group | {"params": [parameters[id(each)] for each in group["params"]]} for group in groups]
    # Biases, norms, class token and position embedding have no TRAIN.WEIGHT_DECAY: pulling them to zero changes the
    # function without simplifying it. Saved states depend on the order of the groups: decayed ones first, unlike timm.
    decayed, kept = [], []
    for name, parameter in own.items():
        if parameter.requires_grad:
            is_small = parameter.ndim <= 1 or name.endswith(".bias")
            is_kept = is_small or any(fnmatch.fnmatch(name, pattern) for pattern in names)
            (kept if is_kept else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_rates(groups: list[dict], rate: float) -> None:
    """Set the learning rate of each group for the next update: `rate` times its `lr_scale`."""
    for group in groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def numbers_per_weight(settings: Train) -> float:
    """Return how many numbers the optimizer stores per weight, measured by a step on a small matrix."""
    weight = nn.Parameter(torch.zeros(64, 64))  # zeros, because drawing random numbers would change the run
    weight.grad = torch.zeros_like(weight)
    optimizer = build_optimizer(replace(settings, LAYER_DECAY=None), nn.ParameterList([weight]))
    with refusing_arguments(settings):  # timm's constructors check few arguments, so errors occur in the step
        optimizer.step()
    tensors = [each for each in tree_leaves(dict(optimizer.state)) if isinstance(each, torch.Tensor)]
    kept = sum(each.numel() for each in tensors if each.ndim)
    return kept / weight.numel()


def optimizer_bytes(settings: Train, model: nn.Module) -> int:
    """Return the bytes of the optimizer's state: for Adam two numbers per trained weight."""
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return int(numbers_per_weight(settings) * trained)


def load_state(optimizer: torch.optim.Optimizer, state: dict, name: str) -> None:
    """Load the saved state of an optimizer of this name. Raise ValueError if a tensor has the wrong shape."""
    both = state["param_groups"], optimizer.param_groups
    then, now = ([len(group["params"]) for group in groups] for groups in both)
    if then != now:
        raise ConfigError(
            f"-resume: the checkpoint's optimizer has groups of {then} parameters, but this run has {now}; restore the "
            "settings that decide the groups (TRAIN.LAYER_DECAY, MODEL.FREEZE), or start a new run with -pretrained"
        )
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True) if changes_by_element(name) else ():
        for what, kept in state["state"].get(number, {}).items():
            if isinstance(kept, torch.Tensor) and not (is_plain(kept) and kept.shape in (parameter.shape, ())):
                raise ValueError(f"the optimizer's {what} has the wrong shape for weight {number}")
    # torch takes over the saved arguments. Restore the arguments from the settings, which a resume may change.
    taken = inspect.signature(type(getattr(optimizer, "inner", optimizer))).parameters.keys()
    arguments = taken - {"params", "lr"} | {"lr_scale"}
    own = [{name: group[name] for name in arguments & group.keys()} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values_before in zip(optimizer.param_groups, own, strict=True):
        group.update(values_before)
    for values in optimizer.state.values():  # torch does not copy host tensors, and the saved ones are in a mapped file
        values.update({name: each.clone() for name, each in values.items() if isinstance(each, torch.Tensor)})


def check_optimizer(config: Config) -> None:
    """Refuse an optimizer that does not exist or does not work with the other settings."""
    chosen, train, strategy = config.TRAIN.OPTIMIZER, config.TRAIN, config.DIST.STRATEGY
    check_arguments(chosen, find_class(chosen))
    name = f"{KEY}.NAME is {chosen.NAME}"
    if strategy == "fsdp2" and not changes_by_element(chosen.NAME):
        raise ConfigError(
            f"{name} and DIST.STRATEGY is {strategy}, which do not go together: the optimizer needs norms or means of "
            "whole weights, but each process has only some rows; use DIST.STRATEGY ddp, or AdamW"
        )
    numbers_per_weight(train)  # makes a first step, because few constructors check their arguments


def changes_by_element(name: str) -> bool:
    """Return whether each element of a weight is updated by its own gradients only, so that weights can be sharded."""
    if name in OURS:
        return True
    from engine.train.timm_optimizers import BY_ELEMENT

    return name in BY_ELEMENT


def find_class(chosen: Optimizer) -> Callable:
    """Return the class of the chosen optimizer. If it is not torch's, import timm, which takes seconds."""
    if chosen.NAME in OURS:
        return without_compiler(getattr(torch.optim, chosen.NAME))
    from engine.train.timm_optimizers import find_timms

    return find_timms(chosen.NAME)
