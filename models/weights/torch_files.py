"""Files of torch.save and .safetensors: read without running anything in them, and written."""

import argparse
import contextlib
import json
import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from models.weights.sharded import SHARDS, join, shard_names
from models.weights.state import (
    RECORD,
    Weights,
    check_kinds,
    check_tensors,
    record_of,
    refusal,
    refuse_bomb,
    weights_of,
)
from utils.errors import ConfigError, naming_damage, not_a_file
from utils.torch_internals import ALLOWED_IN_WEIGHTS

ALLOWED_IN_WEIGHTS.pop("builtins.bytearray", None)  # of which 20 bytes of a file would take all memory


def read_torch(path: Path, lazily: bool = False, compares: bool = True):
    """Read a file of torch.save: tensors and plain values only, nothing in it is run.

    `lazily`: tensors are read when they are used. A sharded checkpoint is joined; its large tensors are then Parts.
    `compares`: with the file's checksums, which reads all of it.
    """
    content = _read_torch_file(path, lazily, compares)
    if isinstance(content, dict) and isinstance(content.get(SHARDS), list):
        return join(content, path, lambda part: _read_torch_file(part, from_disk=True), lazily)
    return content


def _read_torch_file(path: Path, from_disk: bool, compares: bool = True):
    """`from_disk`: map the file, so that tensors are read when they are used. `compares`: all of it with its checksums."""
    try:
        if kind := not_a_file(path):
            raise ConfigError(f"{path}: damaged: it is {kind}")
        if compares and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                refuse_bomb(archive, path)
                broken = archive.testzip()  # torch.load does not compare the checksums that torch.save wrote
            if broken:
                raise ConfigError(f"{path}: damaged (checksum of {broken})")
        # timm, DeiT and torchvision save their command line beside the weights; it is plain data.
        with torch.serialization.safe_globals([argparse.Namespace]):
            if from_disk:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                with open(path, "rb") as file:  # for a path torch goes by the suffix
                    content = torch.load(file, map_location="cpu", weights_only=True)
        if isinstance(content, dict):
            check_kinds(content, path)
        return content
    except ConfigError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in zip or pickle
        forbidden = re.search(r"GLOBAL (\S+)|TorchScript", str(error))
        if forbidden:
            raise refusal(path, forbidden[1] or "TorchScript") from None
        # Not torch's own words: they advise to read the file without this protection.
        raise ConfigError(f"{path}: damaged, or not a file of weights ({type(error).__name__})") from None


def read_torch_weights(path: Path) -> Weights:
    content = read_torch(path)
    state, key = weights_of(content, path)
    check_tensors(state, path)
    return Weights(by_timms_names(state), key, record_of(content) if key else {})


def by_timms_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a wrapped model, and of torchvision's and transformers' models, renamed."""
    from models.weights.names import from_torchvision, from_transformers, is_of_transformers

    # DDP's and torch.compile's prefixes come in either order; torch's AveragedModel counts in n_averaged.
    plain = {re.sub(r"^((module|_orig_mod)\.)+", "", name): tensor for name, tensor in state.items()}
    state = {name: tensor for name, tensor in plain.items() if name != "n_averaged"}
    return from_transformers(state) if is_of_transformers(state) else from_torchvision(state)


def record_in_torch_file(path: Path) -> dict:
    """What a checkpoint says beside its weights, of which none is read; {} for a file of before 2020."""
    content = read_index(path) if zipfile.is_zipfile(path) else {}
    with contextlib.suppress(ConfigError):  # of a file without weights, as whoever reads them says
        content = content | {"weights": weights_of(content, path)[1]}
    return record_of(content)


def read_index(path: Path) -> dict:
    """What a file of torch.save holds; its tensors are not read before they are used."""
    content = _read_torch_file(path, from_disk=True, compares=False)
    return content if isinstance(content, dict) else {}


def named_shards(path: Path) -> list[str]:
    """The files that a checkpoint consists of besides its index; empty for a single file."""
    return shard_names(read_index(path), path)


def read_safetensors(path: Path) -> Weights:
    import safetensors.torch

    with naming_damage(path, safetensors.SafetensorError, OSError):
        return Weights(by_timms_names(safetensors.torch.load_file(path)), record=record_in_safetensors(path))


def record_in_safetensors(path: Path) -> dict:
    """What scripts/export.py wrote beside the weights; other programs' metadata need not be JSON."""
    from safetensors import SafetensorError, safe_open

    with naming_damage(path, SafetensorError, OSError), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    record = {}
    for name in RECORD:
        with contextlib.suppress(KeyError, RecursionError, ValueError):
            record[name] = json.loads(metadata[name])
    return record_of(record)


def to_safetensors(state: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    from safetensors.torch import save

    # The format knows no tensors that share memory or lie in other than row order.
    return save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}, metadata)
