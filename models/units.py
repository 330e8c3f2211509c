"""Standardized numbers in the units of the data."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from configs.schema import Config

FAR = 500  # standard deviations; float32 rounds a mean so far from 0 by up to 3e-5 of a deviation


class Scale(NamedTuple):
    """The mean and the standard deviation by which each number is standardized."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    @classmethod
    def of(cls, config: Config) -> "Scale | None":
        """Return the scale of a model. None: its outputs are no standardized numbers."""
        means, deviations = config.DATA.TARGET_MEAN, config.DATA.TARGET_STD
        if config.task.has_classes or not means:
            return None
        return cls(means, deviations)

    def in_units(self, numbers: Tensor) -> Tensor:
        """Return standardized numbers [..., outputs] in the units of the data.

        They are float64 if float32 would round them, as it rounds times in seconds since 1970 to minutes.
        """
        is_far = any(abs(mean) > FAR * deviation for mean, deviation in zip(*self, strict=True))
        if is_far and numbers.device.type == "mps":  # which has no float64
            numbers = numbers.cpu()
        dtype = torch.float64 if is_far else torch.float32
        mean, deviation = (torch.tensor(each, dtype=dtype, device=numbers.device) for each in self)
        return numbers.to(dtype) * deviation + mean


class InUnits(nn.Module):
    """A model whose standardized numbers are returned in the units of the data."""

    def __init__(self, model: nn.Module, scale: Scale):
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, images: Tensor) -> Tensor:
        return self.scale.in_units(self.model(images))

    def standardized(self, numbers: Tensor) -> Tensor:
        """Return numbers in the units of the data as this model's layers return them, in float64."""
        means, deviations = (torch.tensor(each, dtype=torch.float64) for each in self.scale)
        return (numbers - means) / deviations
