"""Joins the files of a sharded checkpoint."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from models.weights.sharded import FOLDER, ROWS, SHARDS, Shards, changed, is_plain
from utils.errors import ConfigError, naming_damage


def shard_names(index: dict, path: Path) -> list[str]:
    """Return the shards listed in the index at `path`, or [] if it lists none. All must be in the shards/ folder."""
    names = index.get(SHARDS, [])
    for name in names if isinstance(names, list) else [names]:
        parts = PurePosixPath(name).parts if isinstance(name, str) else ()
        if parts[:1] != (FOLDER,) or ".." in parts:
            raise ConfigError(f"{path}: damaged ({name!r} is not below {FOLDER}/); restore it, or use another file")
    return names


def join(index: dict, path: Path, read: Callable[[Path], dict[str, Tensor]], lazily: bool) -> dict:
    """Join the index at `path` and the files that it lists into a state. With `lazily`, large tensors are Shards."""
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
        tensors = [each.get(place) for each in pieces]
        if not (tensors and all(is_plain(each) and each.shape[1:] == tensors[0].shape[1:] for each in tensors)):
            raise ConfigError(f"{wrong} ({place} is missing or invalid); {remedy}")
        if (rows := sum(map(len, tensors))) != value[ROWS]:
            raise ConfigError(f"{wrong} ({place} has {rows} rows in the shards, {value[ROWS]} in the index); {remedy}")
        parts = Shards(tensors)
        return parts if lazily else parts.whole()

    with naming_damage(path):
        return changed(state, find)
