"""Weights files: finding a file, detecting its format from its content, and reading it under timm's names."""

import zipfile
from pathlib import Path

import numpy as np
from torch import Tensor

from models.weights.names import from_google
from models.weights.state import RESTORE, Weights, check_record, check_tensors, merged, refuse_bomb, weights_of
from models.weights.torch_files import (
    read_safetensors,
    read_torch,
    read_torch_weights,
    record_in_safetensors,
    record_in_torch_file,
)
from utils.errors import ConfigError, naming_damage, not_a_file
from utils.files import or_shipped
from utils.runs import weights_in, without_latest

SUFFIXES = (".pdparams", ".pth", ".safetensors", ".npz")


def read_google(path: Path) -> Weights:
    """Read the weights in a .npz file of Google's vision_transformer."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Weights(from_google({name: archive[name] for name in archive.files}))
    except Exception as error:  # a damaged zip or header, or a pickle, which is refused
        kind = type(error).__name__
        raise ConfigError(f"{path}: damaged, or not one of Google's ViTs ({kind}: {error}); {RESTORE}") from None


def read_paddle(path: Path) -> Weights:
    """Read a .pdparams file of PaddleViT. Raise ConfigError for other files."""
    from models.weights.paddle import read_paddle_weights

    return read_paddle_weights(path)


READERS = {
    "google": read_google,
    "torch": read_torch_weights,
    "safetensors": read_safetensors,
    "paddle": read_paddle,
}
IN_A_FOLDER = ("model.safetensors", "pytorch_model.bin")  # the names of weights files on the Hugging Face hub


def find_file(source: str | Path) -> Path | None:
    """Return the file of this name, or None if there is no file.

    The suffix may be missing, because PaddleViT once forbade the suffix and later required it. For a run, named by
    `latest` or its folder, return its best weights. For a folder in the Hugging Face hub's format, return the weights
    next to its config.json.
    """
    path = Path(without_latest(source).removeprefix("local-dir:")).expanduser()
    names = IN_A_FOLDER if (path / "config.json").is_file() else ()
    inside = next((path / name for name in names if (path / name).is_file()), None)
    if inside := inside or weights_in(path):
        return inside
    for candidate in (path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES if path.name)):
        if (file := or_shipped(candidate)).is_file():
            return file
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.suffix in SUFFIXES)
        if not names:
            raise ConfigError(f"{path} is a folder without weights; name a file of weights, or the folder of a run")
        raise ConfigError(f"{path} is a folder; name a file in it: {', '.join(names)}")
    if path.exists():  # a pipe may block forever, and a device may be endless
        raise ConfigError(f"{path} is {not_a_file(path)}; name a file")
    return None


def read_state_dict(source: str | Path) -> dict[str, Tensor]:
    """Return the weights in a file of any format, under timm's names."""
    return read_weights(source).state


def read_weights(source: str | Path) -> Weights:
    """Return the weights in a file of any format, with their metadata."""
    path = find_file(source)
    if path is None:
        raise ConfigError(f"there is no file {source}, with or without a suffix ({', '.join(SUFFIXES)}); fix the path")
    with naming_damage(path):  # tensors with known names may have unexpected shapes
        weights = READERS[format_of(path)](path)
    check_tensors(weights.state, path)
    for name, tensor in weights.state.items():
        if not tensor.isfinite().all():
            raise ConfigError(f"{path}: {name} contains NaN or infinite values; use an earlier checkpoint")
    if not weights.state:
        raise ConfigError(f"{path} contains no weights; use another file")
    with naming_damage(path):
        return weights._replace(state=merged(weights.state, weights.record.get("config", {})))


def read_record(path: Path) -> dict:
    """Return the metadata in a halfstep file, such as its class names. Other programs write little or none."""
    reader = {"torch": record_in_torch_file, "safetensors": record_in_safetensors}.get(format_of(path))
    record = reader(path) if reader else {}
    check_record(record, path)
    return record


def format_of(path: Path) -> str:
    """Return the key of READERS for a file, by its first bytes."""
    if kind := not_a_file(path):
        raise ConfigError(f"{path} is {kind}; name a file")
    if path.suffix.lower() in (".yaml", ".yml"):
        raise ConfigError(f"{path} is a settings file, not weights; use it with -cfg {path}, or name a file of weights")
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(16)
    if head[:4] == b"PK\x03\x04":
        return "google" if _holds_arrays(path) else "torch"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return "safetensors"
    if head[2:14] == b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19":  # the magic number of torch.save until 2020
        return "torch"
    return "paddle"


def _holds_arrays(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bomb(archive, path)
            return all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile:
        raise ConfigError(f"{path}: damaged or cut off; {RESTORE}") from None


def find_and_read(source: str | Path, needed: set[str]) -> tuple[Path, dict]:
    """Return the path and state of a halfstep checkpoint. Raise ConfigError unless it has all `needed` keys."""
    path = find_file(source)
    if path is None:
        raise ConfigError(
            f"no checkpoint at {source}; give the folder of a run, or its best.pth, last.pth or checkpoint-N.pth"
        )
    state = read_torch(path) if format_of(path) == "torch" else {}
    if not (isinstance(state, dict) and needed <= state.keys()) and read_record(path):  # the file is an export
        weights = read_weights(path)
        state = {weights.record.get("weights", "state_dict"): weights.state, **weights.record}
    if missing := needed - set(state if isinstance(state, dict) else ()):
        raise ConfigError(
            f"{path} is not a checkpoint of a run, because it lacks {', '.join(sorted(missing))}; give the run's "
            "best.pth, last.pth or checkpoint-N.pth"
        )
    return path, state


def chosen_weights(state: dict, path: Path, key: str | None = None) -> tuple[str, dict]:
    """Return the key and the weights, with adapters merged. Without `key`, choose the better of raw and EMA weights."""
    key = key or weights_of(state, path)[1]
    if not state.get(key):
        is_ema = key == "state_dict_ema"
        has = "no moving average, because its run had TRAIN.MODEL_EMA off" if is_ema else "only the moving average"
        raise ConfigError(f"{'-ema' if is_ema else '-raw'}: {path} has {has}; leave the flag out")
    with naming_damage(path):
        check_tensors(state[key], path)
        return key, merged(state[key], state.get("config", {}))
