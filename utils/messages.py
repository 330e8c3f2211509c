"""Values that processes send each other, as JSON and arrays. Unlike a pickle, a message cannot run code.

`types` of a function are the classes of named tuples that the value may contain.
"""

import io
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.lib.format import read_array

HEADER = struct.Struct("<Q")  # the length of the JSON text, before the arrays


def to_bytes(value: Any, types: Sequence[type] = ()) -> bytes:
    """Return a value of numbers, texts, paths, lists, tuples, dictionaries, arrays and tensors as bytes."""
    arrays = io.BytesIO()
    text = json.dumps(_to_json(value, types, arrays), ensure_ascii=False).encode(errors="surrogatepass")
    return HEADER.pack(len(text)) + text + arrays.getvalue()


def from_bytes(message: bytes, types: Sequence[type] = ()) -> Any:
    """Return the value that `to_bytes` was given, with the same types."""
    (length,) = HEADER.unpack_from(message)
    arrays = io.BytesIO(message[HEADER.size + length :])
    content = json.loads(message[HEADER.size : HEADER.size + length].decode(errors="surrogatepass"))
    return _from_json(content, {kind.__name__: kind for kind in types}, arrays)


def broadcast_value(value: Any, group: dist.ProcessGroup, types: Sequence[type] = ()) -> Any:
    """Return the value of process 0 in every process. Collective."""
    is_first = dist.get_rank() == 0
    message = to_bytes(value, types) if is_first else b""
    length = torch.tensor([len(message)])
    dist.broadcast(length, src=0, group=group)
    content = _to_tensor(message, int(length))
    dist.broadcast(content, src=0, group=group)
    return value if is_first else from_bytes(content.numpy().tobytes(), types)


def gather_values(value: Any, group: dist.ProcessGroup, types: Sequence[type] = ()) -> list:
    """Return the values of all processes in rank order, in every process. Collective."""
    message = to_bytes(value, types)
    lengths = [torch.tensor([0]) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    longest = int(max(lengths))
    contents = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(contents, _to_tensor(message, longest), group=group)
    pairs = zip(contents, lengths, strict=True)
    return [from_bytes(content[: int(length)].numpy().tobytes(), types) for content, length in pairs]


def _to_tensor(message: bytes, length: int) -> torch.Tensor:
    """Return the bytes as a tensor of this length, filled up with zeros."""
    return torch.frombuffer(bytearray(message.ljust(length, b"\0")), dtype=torch.uint8)


def _to_json(value: Any, types: Sequence[type], arrays: io.BytesIO) -> Any:
    """Return a value as plain JSON. A container becomes a list that begins with its kind; arrays go into `arrays`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        np.save(arrays, np.asarray(value), allow_pickle=False)
        return ["number"]
    if isinstance(value, Path):
        return ["path", str(value)]
    if kind in (list, tuple, *types):
        return [kind.__name__, *(_to_json(item, types, arrays) for item in value)]
    if kind is dict:
        pairs = ([_to_json(part, types, arrays) for part in pair] for pair in value.items())
        return ["dict", *pairs]
    if kind is np.ndarray:
        np.save(arrays, value, allow_pickle=False)
        return ["array"]
    if kind is torch.Tensor:
        content = value.detach().cpu().contiguous()
        np.save(arrays, content.view(-1).view(torch.uint8).numpy(), allow_pickle=False)
        return ["tensor", str(content.dtype).removeprefix("torch."), *content.shape]
    raise TypeError(f"a value of type {kind.__name__} cannot be sent to another process; send its content")


def _from_json(value: Any, types: Mapping[str, type], arrays: io.BytesIO) -> Any:
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "path":
        return Path(items[0])
    if kind == "number":
        return read_array(arrays, allow_pickle=False)[()]
    if kind == "array":
        return read_array(arrays, allow_pickle=False)
    if kind == "tensor":
        dtype, *shape = items
        return _to_typed(read_array(arrays, allow_pickle=False), dtype, shape)
    if kind == "dict":
        return {_from_json(key, types, arrays): _from_json(item, types, arrays) for key, item in items}
    contents = [_from_json(item, types, arrays) for item in items]
    if kind == "list":
        return contents
    return tuple(contents) if kind == "tuple" else types[kind](*contents)


def _to_typed(content: np.ndarray, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of this type, such as "float32", and shape. `content`: its bytes."""
    dtype = vars(torch)[name]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no type of numbers")
    # torch cannot change the type of an empty NumPy array (torch 2.14).
    values = torch.from_numpy(content).view(dtype) if content.size else torch.empty(0, dtype=dtype)
    return values.view(shape)
