"""Sharded checkpoints: one file per process that wrote it. Which rows each holds, and how the tensors are joined."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import ConfigError

ROWS = "rows_in_shards"  # in the index {ROWS: 12} replaces a tensor of 12 rows
SHARDS = "shards"  # in the index: the files with its rows, in order
FOLDER = "shards"  # of these files, beside the index


class Parts:
    """A tensor split by rows; each part is read from disk when it is used."""

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
        """Read only these rows, from the files that have them."""
        pieces, first = [self._parts[0][:0]], 0
        for part in self._parts:
            pieces.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += len(part)
        return torch.cat(pieces)


def span(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """First row and end of a rank's part of `length` rows; as with FSDP2, the last ranks may get fewer."""
    share = -(-length // world_size)
    return min(rank * share, length), min((rank + 1) * share, length)


def changed(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """Map `change` over the leaves of nested dicts and lists; it gets the place of each (a/0/b) and its value."""
    if isinstance(value, dict) and ROWS not in value:
        return {key: changed(each, change, f"{place}/{key}" if place else str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(changed(each, change, f"{place}/{number}") for number, each in enumerate(value))
    return change(place, value)


def join(index: dict, folder: Path, read: Callable[[Path], dict[str, Tensor]], lazily: bool) -> dict:
    """Join the index and the files that it names to what was saved. `lazily`: large tensors as Parts."""
    state = dict(index)
    files = [folder / name for name in state.pop(SHARDS)]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: missing; a checkpoint in shards needs the folder `{FOLDER}` beside it")
    pieces = [read(file) for file in files]

    def find(place: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            parts = Parts([each[place] for each in pieces])
        except KeyError:
            raise ConfigError(f"{folder}: its shards are not those of its index ({place} is in none)") from None
        return parts if lazily else parts.whole()

    return changed(state, find)
