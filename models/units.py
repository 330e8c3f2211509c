"""Standardized numbers in the units of the data."""

from collections.abc import Sequence

import torch
from torch import Tensor

FAR = 500  # standard deviations; float32 rounds a mean so far from 0 by up to 3e-5 of a deviation


def to_units(numbers: Tensor, means: Sequence[float], deviations: Sequence[float]) -> Tensor:
    """Return standardized numbers [..., outputs] in the units of the data.

    They are float64 if float32 would round them, as it rounds times in seconds since 1970 to minutes.
    """
    is_far = any(abs(mean) > FAR * deviation for mean, deviation in zip(means, deviations, strict=True))
    if is_far and numbers.device.type == "mps":  # which has no float64
        numbers = numbers.cpu()
    dtype = torch.float64 if is_far else torch.float32
    mean, deviation = (torch.tensor(each, dtype=dtype, device=numbers.device) for each in (means, deviations))
    return numbers.to(dtype) * deviation + mean
