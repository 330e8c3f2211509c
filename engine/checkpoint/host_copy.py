"""A copy of a run's state in the host's memory, so that training goes on while it is written."""

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor

CHUNK = 2**26  # bytes: page-locked memory is handed out in powers of two, so much of a larger piece would lie idle


class HostCopy:
    """Memory for one copy, used again for the next: what was taken before is gone then."""

    def __init__(self, device: torch.device):
        self._is_cuda, self._device = device.type == "cuda", device
        self._layout: list[tuple] = []
        self._copies: list[Tensor] = []

    def take(self, state: dict) -> dict:
        """The same state as of now. From a CUDA device all tensors come by one queue, with one wait at its end."""
        tensors: list[Tensor] = []
        rebuilt(state, tensors.append)
        layout = [(each.dtype, each.shape, each.stride()) for each in tensors]
        if layout != self._layout:
            self._copies = []  # before the new ones, so that there are never two
            self._copies, self._layout = allocate(tensors, self._is_cuda), layout
        for mine, tensor in zip(self._copies, tensors, strict=True):
            mine.copy_(tensor, non_blocking=self._is_cuda)
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        copies = iter(self._copies)
        return rebuilt(state, lambda tensor: next(copies))


def rebuilt(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nest of dicts, lists and tuples with its tensors changed, in a fixed order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        new = copy(value)  # not value.copy(): the versions of a model's modules hang on its state as an attribute
        new.update((key, rebuilt(each, change)) for key, each in value.items())
        return new
    if isinstance(value, list | tuple):
        return type(value)(rebuilt(each, change) for each in value)
    return value


def allocate(tensors: Iterable[Tensor], pinned: bool) -> list[Tensor]:
    """Tensors on the host of the same types, shapes and strides, each with a storage of its own, as a file needs."""
    copies, start, chunk = [], 0, torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # dense, whatever view the tensor is
        if start + like.nbytes > chunk.numel():
            start, chunk = 0, torch.empty(max(CHUNK, like.nbytes), dtype=torch.uint8, pin_memory=pinned)
        storage = chunk.untyped_storage()[start : start + like.nbytes]
        copies.append(torch.empty(0, dtype=tensor.dtype).set_(storage, 0, like.shape, like.stride()))
        start += (like.nbytes // 64 + 1) * 64  # each at a cache line, and no two at one place
    return copies
