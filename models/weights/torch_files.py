"""Files of torch.save and .safetensors: reading without executing their contents, and writing."""

import argparse
import contextlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.weights.joined import join, shard_names
from models.weights.record import RECORD, record_of
from models.weights.sharded import SHARDS
from models.weights.state import RESTORE, Weights, check_kinds, check_tensors, refusal, refuse_bomb, weights_of
from utils.errors import ConfigError, naming_damage, not_a_file
from utils.torch_internals import ALLOWED_IN_WEIGHTS

ALLOWED_IN_WEIGHTS.pop("builtins.bytearray", None)  # 20 bytes in a file can call bytearray and fill all memory


def read_torch(path: Path, lazily: bool = False, verify: bool = True):
    """Read tensors and plain values from a file of torch.save, without executing its contents.

    With `lazily`, tensors are read when they are used. A sharded checkpoint is joined, and with `lazily` its large
    tensors are `Shards`. With `verify`, the file's checksums are verified, which reads the whole file.
    """
    content = _read_one_file(path, lazily, verify)
    if isinstance(content, dict) and isinstance(content.get(SHARDS), list):
        return join(content, path, lambda part: _read_one_file(part, mapped=True, verify=verify), lazily)
    return content


def _read_one_file(path: Path, mapped: bool, verify: bool = True):
    """Read one file. If it is mapped, its tensors are read when they are used.

    A mapped file must not be overwritten in place while its tensors are used, because the system would end the process.
    """
    try:
        if kind := not_a_file(path):  # reading a pipe may block forever
            raise ConfigError(f"{path}: damaged ({kind} instead of a file); {RESTORE}")
        is_zip = zipfile.is_zipfile(path)
        if verify and is_zip:
            with zipfile.ZipFile(path) as archive:
                refuse_bomb(archive, path)
                broken = archive.testzip()  # torch.load does not verify the checksums that torch.save wrote
            if broken:
                raise ConfigError(f"{path}: damaged (wrong checksum of {broken}); {RESTORE}")
        # timm, DeiT and torchvision save their command line with the weights as a Namespace, which is plain data.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and is_zip)
        if isinstance(content, dict):
            check_kinds(content, path)
        return content
    except ConfigError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in zip or pickle
        forbidden = re.search(r"GLOBAL (\S+)|TorchScript", str(error))
        if forbidden:
            raise refusal(path, forbidden[1] or "TorchScript") from None
        # torch's own message is not shown, because it recommends reading the file without this protection.
        raise ConfigError(f"{path}: damaged, or not a weights file ({type(error).__name__}); {RESTORE}") from None


def read_torch_weights(path: Path) -> Weights:
    from models.weights.names import by_timms_names  # local: a run that starts from random weights does not need it

    content = read_torch(path)
    state, key = weights_of(content, path)
    check_tensors(state, path)
    return Weights(by_timms_names(state), key, record_of(content) if key else {})


def record_in_torch_file(path: Path) -> dict:
    """Return a checkpoint's metadata without reading its weights, or {} for a file in torch's pre-2020 format."""
    content = read_index(path) if zipfile.is_zipfile(path) else {}
    with contextlib.suppress(ConfigError):  # a file without weights is reported when its weights are read
        content = content | {"weights": weights_of(content, path)[1]}
    return record_of(content)


def read_index(path: Path) -> dict:
    """Return the dict in a file of torch.save. Its tensors are read when they are used."""
    content = _read_one_file(path, mapped=True, verify=False)
    return content if isinstance(content, dict) else {}


def named_shards(path: Path) -> list[str]:
    """Return the names of a checkpoint's shards, or [] for a single file."""
    return shard_names(read_index(path), path)


def read_safetensors(path: Path) -> Weights:
    import safetensors.torch

    from models.weights.names import by_timms_names

    with naming_damage(path, safetensors.SafetensorError, OSError):
        return Weights(by_timms_names(safetensors.torch.load_file(path)), record=record_in_safetensors(path))


def record_in_safetensors(path: Path) -> dict:
    """Return the metadata that scripts/export.py wrote with the weights. Metadata of other programs may not be JSON."""
    from safetensors import SafetensorError, safe_open

    with naming_damage(path, SafetensorError, OSError), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    record = {}
    for name in RECORD:
        with contextlib.suppress(KeyError, RecursionError, ValueError):
            record[name] = json.loads(metadata[name])
    return record_of(record)


def to_safetensors(state: dict[str, Tensor], record: Mapping[str, Any] = {}) -> bytes:
    """Return the content of a file of these weights, with metadata that record_in_safetensors reads."""
    from safetensors.torch import save

    metadata = {"format": "pt"} | {name: json.dumps(fact) for name, fact in record.items()}
    # The format supports neither tensors that share memory nor layouts other than row-major.
    return save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}, metadata)
