"""Sharded checkpoints: splitting tensors by rows between the processes, and joining the files."""

from collections.abc import Callable
from copy import copy
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from utils.errors import ConfigError, naming_damage

ROWS = "rows_in_shards"  # in the index, {ROWS: 12} replaces a tensor of 12 rows
SHARDS = "shards"  # the key in the index for the list of files, in the order of their rows
FOLDER = "shards"  # the folder of the shards, next to the index
PIECES = "pieces"  # the key in a state to save for {path of a tensor: the rows that this process saves}

NUMBERS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


class Parts:
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


def shard_names(index: dict, path: Path) -> list[str]:
    """Return the shards listed in the index at `path`, or [] if it lists none. All must be in the shards/ folder."""
    names = index.get(SHARDS, [])
    for name in names if isinstance(names, list) else [names]:
        parts = PurePosixPath(name).parts if isinstance(name, str) else ()
        if parts[:1] != (FOLDER,) or ".." in parts:
            raise ConfigError(f"{path}: damaged ({name!r} is not below {FOLDER}/); restore it, or use another file")
    return names


def join(index: dict, path: Path, read: Callable[[Path], dict[str, Tensor]], lazily: bool) -> dict:
    """Join the index at `path` and the files that it lists into a state. With `lazily`, large tensors are Parts."""
    files = [path.parent / name for name in shard_names(index, path)]
    state = {name: value for name, value in index.items() if name != SHARDS}
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is missing; restore the folder `{FOLDER}` next to {path.name}")
    pieces = [read(file) for file in files]
    wrong, remedy = f"{path}: the shards do not match this index", "restore both, or use another file"

    def find(place: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found = [each.get(place) for each in pieces]
        if not (found and all(is_plain(each) and each.shape[1:] == found[0].shape[1:] for each in found)):
            raise ConfigError(f"{wrong} ({place} is missing or invalid); {remedy}")
        if (rows := sum(map(len, found))) != value[ROWS]:
            raise ConfigError(f"{wrong} ({place} has {rows} rows in the shards, {value[ROWS]} in the index); {remedy}")
        parts = Parts(found)
        return parts if lazily else parts.whole()

    with naming_damage(path):
        return changed(state, find)
