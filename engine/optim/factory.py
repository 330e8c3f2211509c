"""Builds the optimizer of the settings."""

import torch

from configs.schema import Train
from engine.optim.groups import parameter_groups


def build_optimizer(
    settings: Train, model: torch.nn.Module, own: dict[str, torch.nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of all trainable parameters; fused, which is faster and can skip an update on the device.

    `own`: this process's part of each parameter, if they are sharded.
    """
    own = dict(model.named_parameters()) if own is None else own
    groups = parameter_groups(settings, model, own)
    chosen = settings.OPTIMIZER
    cls = getattr(torch.optim, chosen.NAME)
    # On MPS the fused kernels of older versions of torch ignore found_inf and grad_scale, so no update would be skipped.
    common = {"lr": settings.BASE_LR, "fused": next(iter(own.values())).device.type != "mps"}
    if chosen.NAME != "SGD":
        return cls(groups, betas=chosen.BETAS, eps=chosen.EPS, **common)
    optimizer = cls(groups, momentum=chosen.MOMENTUM, **common)
    for parameter in [each for group in groups for each in group["params"]] if chosen.MOMENTUM else ():
        # torch allocates it in the first update, and leaves it uninitialised if that one is skipped.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
