"""Optimizers by name on a tiny model, with gradients computed from a number."""

import dataclasses
import functools

import torch
from torch import nn

from configs.schema import Optimizer, Precision, Train
from engine.parallel import Parallel
from engine.train.clipping import Clipping
from engine.train.fused_loss_scale import FusedLossScaler
from engine.train.loss_scale import LossScaler
from engine.train.optimizers import OURS, build_optimizer
from tests.support.configs import CPU
from tests.support.pretend_device import waits
from utils.distributed import Process


@functools.cache
def one_of_each_class() -> list[str]:
    """Return our optimizers, and one name for each supported class of timm. Its other names only preset arguments."""
    from timm.optim import get_optimizer_class, list_optimizers

    names = list_optimizers(exclude_filters=["bnb*", "fused*", "kron*", "adahessian"])
    others = [name for name in names if name not in ("adam", "adamw", "sgd", "nesterov")]
    return [*OURS, *{get_optimizer_class(name, bind_defaults=False): name for name in others}.values()]


class Learner:
    """A tiny model with an optimizer and a loss scaler, whose scale is 1."""

    def __init__(self, name: str, device: str | torch.device = "cpu", width: int = 16, **settings):
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(width, 3)).to(self.device)
        train = Train(OPTIMIZER=Optimizer(NAME=name), BASE_LR=1e-2, WEIGHT_DECAY=0.1)
        train = dataclasses.replace(train, **settings)
        self.optimizer, self.clipping = build_optimizer(train, self.model), Clipping(train, self.model.parameters())
        scaler = LossScaler if self.device.type == "cpu" else FusedLossScaler
        self.scaler = scaler(self.device.type, Precision(), needed=False)
        self.scaler.scale(torch.zeros(1).to(self.device))  # creates the tensor of the scale
        self.waits: dict[str, int] = {}  # waits of the host in the last step, with the pretend device

    def step(self, number: int, overflows: bool = False) -> "Learner":
        draws = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=draws)
            if overflows:
                gradient.view(-1)[0] = float("nan")
            parameter.grad = gradient.to(self.device)
        with waits() as self.waits:
            self.scaler.unscale_and_clip(
                self.optimizer, list(self.model.parameters()), Parallel(Process(CPU)), self.clipping
            )
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self

    def state(self) -> dict:
        """Return the state that a checkpoint would contain, copied to the host."""
        weights = [each.detach() for each in self.model.parameters()]
        return on_host({"weights": weights, "optimizer": self.optimizer.state_dict()})


def on_host(value):
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [on_host(each) for each in value]
    return value.cpu().clone() if isinstance(value, torch.Tensor) else value
