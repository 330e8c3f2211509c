"""The mean of the weights of several checkpoints, tensor by tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


def average(states: Sequence[dict[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """In float64, rounded once to the type of the first. Also running statistics of BatchNorm, as timm's
    avg_checkpoints.py does; of whole numbers, such as its counters, the largest is taken.
    """
    total = sum(shares)
    mean = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        if first.is_floating_point():
            weighted = sum(share * tensor.double() for share, tensor in zip(shares, tensors, strict=True))
            mean[name] = (weighted / total).to(first.dtype)
        else:
            mean[name] = torch.stack(tensors).amax(0)
    return mean
