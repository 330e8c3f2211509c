"""Files and folders of exports: written to a temporary folder, read again and compared, and then renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.open_model import SavedModel
from models.weights.files import read_weights
from models.weights.torch_files import to_safetensors
from utils.errors import ConfigError, UserError, cause_of
from utils.files import refuse_special, sync_folder


class WrongExport(UserError):
    """An error for an export whose results differ from the trained model's. The user can only choose another format."""

    code = 1


def export_weights(saved: SavedModel, target: Path) -> str:
    """Write only the weights, in their own types, with their metadata, and read them again. Return the result."""
    with staged(target) as path:
        path.write_bytes(to_safetensors(saved.weights, saved.record))
        with naming_wrong_export("safetensors", "halfstep", target):
            check_weights(read_weights(path).state, saved.weights)
    return "read again, identical to the last bit"


def check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise WrongExport unless the reloaded weights equal the model's to the last bit."""
    pairs = [(weights.get(name), tensor) for name, tensor in expected.items()]
    is_same = all(one is not None and one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
    if len(weights) != len(expected) or not is_same:
        raise WrongExport("its weights differ from the model's")


@contextlib.contextmanager
def naming_wrong_export(name: str, loaded_by: str, target: Path) -> Iterator[None]:
    """Turn any error while an export is loaded and compared into a WrongExport with the format and the file."""
    try:
        yield
    except Exception as error:  # the type depends on the program that loads the export
        if isinstance(error, ConfigError):  # a mistake of the user, which another format would not change
            raise
        reason = str(error) if isinstance(error, WrongExport) else f"it fails ({type(error).__name__}: {error})"
        raise WrongExport(
            f"-to {name}: when {loaded_by} loads the export, {reason}; {target} was not written. Choose another format"
        ) from error


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. On success all files in its folder are moved to their places, `target` last.

    The temporary path is in its own folder and keeps the file name, because the graph of a large model names its
    weights file.
    """
    target = target.absolute()
    folder = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
        folder.mkdir()
        try:
            yield folder / target.name
            for path in folder.rglob("*"):
                sync_folder(path)
            for path in sorted(folder.iterdir(), key=lambda path_there: path_there.name == target.name):
                place = target.with_name(path.name)
                if not path.is_dir():
                    refuse_special(place)
                os.replace(path, place)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        sync_folder(target.parent)
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and not isinstance(error.__context__, OSError):
            raise
        raise ConfigError(f"-output: {target} cannot be written ({cause_of(error)})") from error
