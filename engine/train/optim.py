"""The optimizer and the learning rate as a function of the step."""

import math

import torch

from configs.schema import Train


def build_optimizer(
    settings: Train, model: torch.nn.Module, own: dict[str, torch.nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of all trainable parameters; fused, which is faster and can skip an update on the device.

    `own`: this process's part of each parameter, if they are sharded.
    """
    own = dict(model.named_parameters()) if own is None else own
    # Biases, norms, class token and position embedding are not decayed: pulling them to zero moves the function
    # without simplifying it.
    names = getattr(model, "no_weight_decay", set)()
    decayed, kept = [], []
    for name, parameter in own.items():
        if parameter.requires_grad:
            (kept if parameter.ndim <= 1 or name in names else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    chosen = settings.OPTIMIZER
    cls = getattr(torch.optim, chosen.NAME)
    # On MPS the fused kernels of older versions of torch ignore found_inf and grad_scale, so no update would be skipped.
    common = {"lr": settings.BASE_LR, "fused": next(iter(own.values())).device.type != "mps"}
    if chosen.NAME != "SGD":
        return cls(groups, betas=chosen.BETAS, eps=chosen.EPS, **common)
    optimizer = cls(groups, momentum=chosen.MOMENTUM, **common)
    for parameter in (*decayed, *kept) if chosen.MOMENTUM else ():
        # torch allocates it in the first update, and leaves it uninitialised if that one is skipped.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Schedule:
    """The learning rate as a function of the step."""

    def __init__(self, settings: Train, steps_per_epoch: int, global_batch: int):
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        scale = global_batch / settings.LINEAR_SCALED_LR if settings.LINEAR_SCALED_LR else 1.0
        self.start, self.base, self.end = (
            rate * scale for rate in (settings.WARMUP_START_LR, settings.BASE_LR, settings.END_LR)
        )

    def __call__(self, step: int) -> float:
        settings = self._settings
        if settings.LR_SCHEDULER.NAME == "paddlevit":  # changes once per epoch, counted from 1
            epoch = step // self._steps_per_epoch + 1
        else:
            epoch = step / self._steps_per_epoch
        if epoch < settings.WARMUP_EPOCHS:
            return self.start + (self.base - self.start) * epoch / settings.WARMUP_EPOCHS
        return self._after_warmup(epoch)

    def _after_warmup(self, epoch: float) -> float:
        settings, chosen = self._settings, self._settings.LR_SCHEDULER
        if chosen.NAME == "constant":
            return self.base
        if chosen.NAME == "step":
            drops = (
                sum(epoch >= milestone for milestone in chosen.MILESTONES)
                if chosen.MILESTONES
                else int(epoch // chosen.DECAY_EPOCHS)
            )
            return self.base * chosen.DECAY_RATE**drops
        length = max(settings.NUM_EPOCHS - settings.WARMUP_EPOCHS, 1e-9)
        done = min((epoch - settings.WARMUP_EPOCHS) / length, 1.0)
        return self.end + (self.base - self.end) * 0.5 * (1 + math.cos(math.pi * done))
