"""The optimizer and the learning rate as a function of the step."""

import math
from collections.abc import Iterator

import torch

from configs.schema import Train
from models.transforms.compiler import WithoutCompiler

FUSED_DEVICES = ("cuda", "cpu", "xpu", "mps")


def build_optimizer(
    settings: Train, model: torch.nn.Module, own: dict[str, torch.nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """The optimizer over the parameters that train; fused, which is faster and can skip an update on the device.

    `own`: what this process moves of each parameter, if not all of it.
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
    cls = (HALF_MOMENT if chosen.FIRST_MOMENT == "bfloat16" else FULL_MOMENT)[chosen.NAME]
    common = {"lr": settings.BASE_LR, "fused": next(iter(own.values())).device.type in FUSED_DEVICES}
    if chosen.NAME != "SGD":
        return cls(groups, betas=chosen.BETAS, eps=chosen.EPS, **common)
    optimizer = cls(groups, momentum=chosen.MOMENTUM, **common)
    for parameter in (*decayed, *kept) if chosen.MOMENTUM else ():
        # torch makes it in the first update, and leaves it unwritten (whatever was in memory) if that one is skipped.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class HalfMoment:
    """Keeps the mean of the gradients in bfloat16 between the steps of a torch optimizer, and its step as it is.

    A mean that moves by a tenth in each step stands the rounding to 8 digits. The mean of the squares would not: what
    moves by a thousandth would be rounded away, so that it stays float32. A skipped step changes nothing, since there
    and back is exact.
    """

    moment: str  # its name in the state

    def step(self) -> None:
        groups = self.param_groups
        try:
            for group in groups:
                for parameters in in_chunks(group["params"]):
                    self.param_groups = [{**group, "params": parameters}]
                    self._convert(parameters, None)
                    super().step()
                    self._convert(parameters, torch.bfloat16)
        finally:
            self.param_groups = groups

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)  # which makes everything float32
        for group in self.param_groups:
            self._convert(group["params"], torch.bfloat16)

    def _convert(self, parameters: list[torch.Tensor], dtype: torch.dtype | None) -> None:
        """Into `dtype`, or the parameters' own. Before the first step there is nothing to convert."""
        known = [each for each in parameters if self.moment in self.state.get(each, {})]
        before = [self.state[each][self.moment] for each in known]
        after = [torch.empty_like(each, dtype=dtype) for each in known]
        if known:
            torch._foreach_copy_(after, before)
        for parameter, moment in zip(known, after, strict=True):
            self.state[parameter][self.moment] = moment


TORCH = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
FULL_MOMENT = {cls.__name__: type(cls.__name__, (WithoutCompiler, cls), {}) for cls in TORCH}
HALF_MOMENT = {
    name: type(name, (HalfMoment, cls), {"moment": "momentum_buffer" if name == "SGD" else "exp_avg"})
    for name, cls in FULL_MOMENT.items()
}


def in_chunks(parameters: list[torch.Tensor], most: int = 2**24) -> Iterator[list[torch.Tensor]]:
    """At most so many elements at a time, so that their moments in float32 take little memory: 64 MiB."""
    chunk, size = [], 0
    for parameter in parameters:
        if chunk and size + parameter.numel() > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += parameter.numel()
    yield chunk


class Schedule:
    """The learning rate of every update, from the number of attempted updates alone."""

    def __init__(self, settings: Train, steps_per_epoch: int, global_batch: int):
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        scale = global_batch / settings.LINEAR_SCALED_LR if settings.LINEAR_SCALED_LR else 1.0
        self.start, self.base, self.end = (
            rate * scale for rate in (settings.WARMUP_START_LR, settings.BASE_LR, settings.END_LR)
        )

    def __call__(self, step: int) -> float:
        settings = self._settings
        if settings.LR_SCHEDULER.NAME == "paddlevit":  # once an epoch, which counts from 1
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
