"""Copies a run's state to host memory, so that training continues while it is written."""

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from utils.host import has_streams

CHUNK = 2**26  # bytes: page-locked memory is allocated in powers of two, so a larger piece would waste much


class HostCopy:
    """Memory for one copy. The next copy reuses it and overwrites the former one."""

    def __init__(self, device: torch.device):
        self._device, self._has_streams = device, has_streams(device)
        self._layout: list[tuple] = []
        self._copies: list[Tensor] = []

    def take(self, state: dict) -> dict:
        """Copy the state; from a device with streams asynchronously, with one synchronisation at the end."""
        tensors: list[Tensor] = []
        map_tensors(state, tensors.append)
        layout = [(each.dtype, each.shape, each.stride()) for each in tensors]
        if layout != self._layout:
            self._copies = []  # freed first, so that memory never holds two
            self._copies, self._layout = allocate(tensors, self._has_streams), layout
        for mine, tensor in zip(self._copies, tensors, strict=True):
            mine.copy_(tensor, non_blocking=self._has_streams)
        if self._has_streams:
            torch.accelerator.current_stream(self._device).synchronize()
        copies = iter(self._copies)
        return map_tensors(state, lambda tensor: next(copies))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply `change` to all tensors in nested dicts, lists and tuples, in a fixed order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        new = copy(value)  # not value.copy(): a state_dict carries module versions as an attribute (_metadata)
        new.update((key, map_tensors(each, change)) for key, each in value.items())
        return new
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(each, change) for each in value)
    return value


def allocate(tensors: Iterable[Tensor], pinned: bool) -> list[Tensor]:
    """Host tensors of the same types, shapes and strides, each with its own storage, as torch.save needs."""
    copies, start, chunk = [], 0, torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # dense, even if the tensor is a view
        if start + like.nbytes > chunk.numel():
            start, chunk = 0, torch.empty(max(CHUNK, like.nbytes), dtype=torch.uint8, pin_memory=pinned)
        storage = chunk.untyped_storage()[start : start + like.nbytes]
        copies.append(torch.empty(0, dtype=tensor.dtype).set_(storage, 0, like.shape, like.stride()))
        start += (like.nbytes // 64 + 1) * 64  # aligned to cache lines; never two at one address
    return copies
