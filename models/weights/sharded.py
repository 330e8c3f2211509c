"""Sharded checkpoints: splitting tensors by rows between the processes. joined.py joins the files."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

ROWS = "rows_in_shards"  # in the index, {ROWS: 12} replaces a tensor of 12 rows
SHARDS = "shards"  # the key in the index for the list of files, in the order of their rows
FOLDER = "shards"  # the folder of the shards, next to the index
PIECES = "pieces"  # the key in a state to save for {path of a tensor: the rows that this process saves}

NUMBERS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


class Shards:
    """A tensor that is split by rows. Each part is read from disk when it is used."""

    def __init__(self, parts: list[Tensor]):
        self._parts = parts

    @property
    def shape(self) -> torch.Size:
        return torch.Size([sum(map(len, self._parts)), *self._parts[0].shape[1:]])

    @property
    def dtype(self) -> torch.dtype:
        return self._parts[0].dtype

    def whole(self) -> Tensor:
        return torch.cat(self._parts)

    def rows(self, start: int, stop: int) -> Tensor:
        """Read only these rows from the files that contain them."""
        pieces, first = [self._parts[0][:0]], 0
        for part in self._parts:
            pieces.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += len(part)
        return torch.cat(pieces)


def span(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's range of rows (start, stop) out of `length`. As in FSDP2, the last ranks may get fewer rows."""
    share = -(-length // world_size)
    return min(rank * share, length), min((rank + 1) * share, length)


def changed(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """Return nested dicts and lists with each leaf replaced by change(path, leaf). A path looks like a/0/b."""
    if isinstance(value, dict) and ROWS not in value:
        # {} would lose a state_dict's attribute _metadata, which records each module's version.
        new = copy(value)
        new.update((key, changed(each, change, f"{place}/{key}" if place else str(key))) for key, each in value.items())
        return new
    if isinstance(value, list | tuple):
        return type(value)(changed(each, change, f"{place}/{number}") for number, each in enumerate(value))
    return change(place, value)


def is_plain(value: object) -> bool:
    """Return whether this is a strided tensor of a usual type with storage for every value, unlike an expanded view."""
    is_usual = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_usual and value.dtype in NUMBERS and value.nbytes <= value.untyped_storage().nbytes()
