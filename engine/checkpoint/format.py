"""Writes checkpoint files safely, reads the progress stored in them, and removes old files."""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.schema import Train
from engine.train.optimizers import optimizer_bytes
from models.weights.record import BEST_SCORES, CALIBRATION, VERSION_KEY
from models.weights.sharded import FOLDER
from utils.errors import ConfigError, naming_damage
from utils.files import replacing, sync

PARTS_NAME = re.compile(r"step-\d+(\.\d+)?")  # the name of a folder in shards/


def save_checkpoint(
    path: Path,
    state: dict,
    extra_names: Iterable[str] = (),
    keep_previous: bool = True,
    check_folder: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint and rename the existing `path` to previous.pth. At any time, one of the two is complete.

    If `keep_previous` is false, the existing `path` is dropped and previous.pth stays as it is.
    `extra_names` lists further names for the file. They are created before `path`: a run killed in between resumes from
    the old `path` and creates them again. In the opposite order, a missing name would never be created.
    `check_folder` raises FolderMoved if the folder now belongs to another run.
    """
    with replacing(path, check=check_folder) as file:
        torch.save(state, file)
        sync(file)
        check_folder()  # again, because writing a large file takes time
        for name in extra_names:
            keep_as(Path(file.name), path.with_name(name))
        if keep_previous and path.exists():
            keep_as(path, path.with_name("previous.pth"))


def checkpoint_bytes(settings: Train, model: nn.Module) -> int:
    """Return the size of weights, EMA and optimizer state in bytes."""
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    return weights * (2 if settings.MODEL_EMA else 1) + optimizer_bytes(settings, model)


def progress_in(path: Path) -> dict[str, Any]:
    """Return the finished epochs, step, best epoch, version, run and parts of a checkpoint, or {} without a valid file.

    The parts are the calibration and the scores of the images.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, it raises no error of a disk or server
        return {}
    from models.weights.torch_files import read_index  # local: a new run has no checkpoint

    try:
        state = read_index(path)
        with naming_damage(path):
            best = state.get("progress", {}).get("best", ())
            facts = {"epoch": state["epoch"] + 1, "step": state["step"], "best": [*best]}
            return facts | {key: state[key] for key in (CALIBRATION, BEST_SCORES, VERSION_KEY, "run") if state.get(key)}
    except ConfigError:
        return {}


def keep_as(path: Path, other: Path) -> None:
    """Give a finished file a second name, replacing an older file of that name. A hard link costs no space or time."""
    temporary = other.with_name(f".{other.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:  # the file system does not support hard links
        with open(path, "rb") as source, replacing(other) as copy:
            shutil.copyfileobj(source, copy)
        return
    try:
        os.replace(temporary, other)
    finally:
        # The temporary link still exists after an error, or if both names already referred to the same file.
        temporary.unlink(missing_ok=True)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all checkpoint-N.pth files except the newest `keep`."""
    for old in numbered(folder)[keep:]:
        old.unlink(missing_ok=True)


def remove_unused_parts(folder: Path) -> None:
    """Remove the shards of deleted checkpoints and killed saves, to which no checkpoint of the run refers.

    Remove only folders whose names have the form that a save uses. Never follow links.
    """
    shards = folder / FOLDER
    if shards.is_symlink() or not shards.is_dir():
        return
    from models.weights.torch_files import named_shards  # local: only fsdp2 saves shards

    try:
        named = {(folder / name).parent for path in folder.glob("*.pth") for name in named_shards(path)}
    except ConfigError:
        return  # an unreadable checkpoint may refer to any shard
    for shard in shards.iterdir():
        if PARTS_NAME.fullmatch(shard.name) and not shard.is_symlink() and shard not in named:
            shutil.rmtree(shard, ignore_errors=True)


def numbered(folder: Path) -> list[Path]:
    """Return all checkpoint-N.pth, newest first. They are sorted by number and not by date, because clocks can jump."""
    pairs = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint-(\d+)\.pth", path.name))
    ]
    return [path for _, path in sorted(pairs, reverse=True)]
