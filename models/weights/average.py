"""The mean of the weights of several checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of these weights, computed in float64 and rounded once to the type of the first state.

    BatchNorm's running statistics are averaged too, as in timm's avg_checkpoints.py. For integers, such as BatchNorm's
    counters, the largest value is used.
    """
    mean = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        if first.is_floating_point():
            mean[name] = (sum(tensor.double() for tensor in tensors) / len(states)).to(first.dtype)
        else:
            mean[name] = torch.stack(tensors).amax(0)
    return mean


def similarity(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the median cosine of the matrices and kernels of two models: near 0 if they have different origins.

    Vectors are left out: the scales of normalization layers are similar in all models.
    """
    pairs = [
        (tensor.double().flatten(), other[name].double().flatten())
        for name, tensor in one.items()
        if tensor.is_floating_point() and tensor.ndim > 1
    ]
    cosines = [torch.nn.functional.cosine_similarity(*pair, dim=0) for pair in pairs]
    return float(torch.stack(cosines).median()) if cosines else 1.0
