"""Paddle's AMP tutorial: three Linear layers, ReLU between, SGD on random numbers, with our Precision doing the AMP."""

import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from configs.load import load
from configs.schema import Config
from engine.precision.policy import Precision, set_matmul

# Name -> settings, and batches per update. Accumulation divides the loss by them, which the tutorial does not.
CASES = {"fp32": ("AMP=false", 1), "AMP": ("AMP=true", 1), "AMP, accumulation over 10": ("AMP=true", 10)}


@dataclass(frozen=True)
class Sizes:
    """The tutorial's on a GPU."""

    width: int = 4096
    batch: int = 512
    batches: int = 50
    epochs: int = 5

    @classmethod
    def scaled(cls, scale: float, epochs: int) -> "Sizes":
        """Multiples of 8, for Tensor Cores."""
        width, batch = (max(8, round(size * scale / 8) * 8) for size in (cls.width, cls.batch))
        return cls(width, batch, epochs=epochs)

    def warm_up(self) -> "Sizes":
        return replace(self, batches=10, epochs=1)


def case_config(name: str, cfg: str, options: list[str]) -> Config:
    """Of the settings only AMP and PRECISION matter here."""
    return load(["-cfg", cfg, "-opts", *options, CASES[name][0]]).config


def train(name: str, config: Config, sizes: Sizes, kind: str) -> tuple[float, float]:
    """Seconds of the whole training and the loss of the last batch; the same weights and data for every case."""
    _, accumulate = CASES[name]
    device = torch.device(kind)
    precision = Precision(config, device)
    set_matmul(config.PRECISION.MATMUL)
    torch.manual_seed(0)
    width = sizes.width
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    net.to(device)
    batches = [torch.randn(2, sizes.batch, width).to(device) for _ in range(min(sizes.batches, 10))]  # used in turn
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, fused=True)  # else the scaler waits for the device
    torch.ones((), device=device).item()  # waits for the device
    start = time.perf_counter()
    for step in range(sizes.epochs * sizes.batches):
        images, targets = batches[step % len(batches)]
        with precision.autocast():
            output = net(images)
        loss = nn.functional.mse_loss(output.float(), targets)
        precision.scaler.scale(loss / accumulate).backward()
        if (step + 1) % accumulate == 0:  # 10 divides the number of batches: there is no rest
            precision.scaler.step(optimizer)
            precision.scaler.update()
            optimizer.zero_grad(set_to_none=True)
    last_loss = loss.item()  # waits for the device
    return time.perf_counter() - start, last_loss
