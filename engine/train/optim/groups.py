"""Parameter groups: which weights are decayed, and how much smaller the rate of an early layer is."""

import fnmatch

from torch import nn

from configs.schema import Train


def parameter_groups(settings: Train, model: nn.Module, own: dict[str, nn.Parameter]) -> list[dict]:
    """The groups of all trainable parameters, as timm makes them. `own`: this process's part of each parameter.

    With TRAIN.LAYER_DECAY a group has an `lr_scale`, which its rate is multiplied by.
    """
    names = getattr(model, "no_weight_decay", set)()
    if settings.LAYER_DECAY is not None:
        return _layer_groups(settings, model, own, names)
    # Biases, norms, class token and position embedding are not decayed: pulling them to zero moves the function
    # without simplifying it. Saved optimizers depend on the order: decayed ones first, not as timm.
    decayed, kept = [], []
    for name, parameter in own.items():
        if parameter.requires_grad:
            is_small = settings.WEIGHT_DECAY_EXCLUDE_1D and (parameter.ndim <= 1 or name.endswith(".bias"))
            is_kept = is_small or any(fnmatch.fnmatch(name, pattern) for pattern in names)
            (kept if is_kept else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _layer_groups(settings: Train, model: nn.Module, own: dict[str, nn.Parameter], names: set[str]) -> list[dict]:
    from timm.optim import param_groups_layer_decay  # local: importing timm takes seconds

    groups = param_groups_layer_decay(
        model,
        weight_decay=settings.WEIGHT_DECAY,
        no_weight_decay_list=names,
        weight_decay_exclude_1d=settings.WEIGHT_DECAY_EXCLUDE_1D,
        layer_decay=settings.LAYER_DECAY,
    )
    mine = {id(parameter): own[name] for name, parameter in model.named_parameters()}
    return [group | {"params": [mine[id(each)] for each in group["params"]]} for group in groups]


def set_rates(groups: list[dict], rate: float) -> None:
    """Give each group its rate for the next update."""
    for group in groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
