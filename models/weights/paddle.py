"""Reads PaddleViT's weights (.pdparams), of its ViT and its DeiT."""

import pickle
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from models.weights.state import RESTORE, Weights, refusal, weights_of
from utils.errors import ConfigError

# A .pdparams file is a pickle, and a pickle may call any Python function by name. The reader executes nothing from the
# file: it allows only a few names, and replaces even these with its own functions, because numpy's constructors trust
# the layout of a dtype in the file.

DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}  # none of these can contain objects


class Refusal(Exception):
    """An error for a file that contains something other than weights."""


def read_pdparams(path: Path) -> dict:
    """Read a file into nested dicts of plain values and numpy arrays. A training file is {model, optimizer, ...}."""
    try:
        with open(path, "rb") as file:
            content = _Reader(file, encoding="latin1").load()
        return _plain(content)
    except Refusal as error:
        raise refusal(path, str(error)) from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise ConfigError(
            f"{path}: damaged, or not a weights file ({type(error).__name__}: {error}); {RESTORE}"
        ) from None


# This uses Python's unpickler, because the C unpickler can allocate 64 GiB for a file of 9 bytes (large memo index).
class _Reader(pickle._Unpickler):
    """An unpickler that accepts the names that numpy and Paddle write, and refuses all others."""

    def find_class(self, module: str, name: str):
        # Pickle protocol 2 uses Python 2's module names, and numpy 2 renamed numpy.core.
        module = module.replace("__builtin__", "builtins").replace("numpy._core", "numpy.core")
        if (module, name) not in STAND_INS:
            raise Refusal(f"{module}.{name}")
        return STAND_INS[module, name]


class _Dtype:
    """A dtype of plain numbers."""

    def __init__(self, code: str, *_):
        if code not in DTYPES:
            raise Refusal(f"numpy array of dtype {code!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """An array whose values follow later in the file as (version, shape, dtype, is_fortran, bytes)."""

    def __init__(self, *_):
        self.array = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, is_fortran, data = state
        self.array = _from_buffer(data, dtype, shape, "F" if is_fortran else "C").array


def _from_buffer(data, dtype: _Dtype, shape: tuple, order: str) -> _Array:
    if not isinstance(dtype, _Dtype) or not isinstance(data, (bytes, bytearray)):
        raise Refusal("a numpy array of objects")
    result = _Array()
    result.array = np.frombuffer(data, dtype.dtype).reshape(shape, order=order)
    return result


def _scalar(dtype: _Dtype, data) -> float:
    return _from_buffer(data, dtype, (), "C").array.item()


def _encode(text: str, encoding: str) -> bytes:
    """Return the bytes that pickle protocol 2 wrote as encoded text."""
    if encoding not in ("latin1", "latin-1"):
        raise Refusal(f"text in {encoding}")
    return text.encode("latin1")


def _eval(code: str, names: dict | None = None) -> _Array:
    """Return the array in eval('data', {'data': array}), which some versions of Paddle write. Nothing is evaluated."""
    is_tensor = code == "data" and isinstance(names, dict) and list(names) == ["data"]
    if not is_tensor or not isinstance(names["data"], _Array):
        raise Refusal(f"eval of {code!r}")
    return names["data"]


STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): "ndarray",  # a placeholder, because it is only an argument of _reconstruct
    ("numpy", "dtype"): _Dtype,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "tuple"): tuple,
    ("builtins", "eval"): _eval,
    ("_codecs", "encode"): _encode,
}


def _plain(value):
    """Unwrap the arrays, drop the names from Paddle's (name, array) pairs, and join split arrays."""
    if isinstance(value, _Array):
        return value.array
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], _Array):
        return value[1].array
    if not isinstance(value, dict):
        return value
    plain = {key: _plain(each) for key, each in value.items() if key != "StructuredToParameterName@@"}
    # Pickle protocols 2 and 3 cannot store more than 4 GB at once, so Paddle splits arrays of 1 GB and more.
    for name, split in plain.pop("UnpackBigParamInfor@@", {}).items():
        plain[name] = np.concatenate([plain.pop(part) for part in split["slices"]]).reshape(split["OriginShape"])
    return plain


# {timm's name: PaddleViT's names over the years}. `#` is the number of a block.
NAMES = {
    "cls_token": ("cls_token", "patch_embedding.cls_token", "embeddings.cls_token", "class_token"),
    "dist_token": ("dist_token", "distill_token"),
    "pos_embed": (
        "position_embedding",
        "patch_embedding.position_embeddings",
        "embeddings.position_embeddings",
        "pos_embed",
    ),
    "patch_embed.proj": ("patch_embedding.patch_embedding", "embeddings.patch_embeddings", "patch_embed.proj"),
    "blocks.#.norm1": ("encoder.layers.#.attn_norm", "encoder.layers.#.norm1"),
    "blocks.#.attn.qkv": ("encoder.layers.#.attn.qkv",),
    "blocks.#.attn.proj": ("encoder.layers.#.attn.out", "encoder.layers.#.attn.proj"),
    "blocks.#.norm2": ("encoder.layers.#.mlp_norm", "encoder.layers.#.norm2"),
    "blocks.#.mlp.fc1": ("encoder.layers.#.mlp.fc1",),
    "blocks.#.mlp.fc2": ("encoder.layers.#.mlp.fc2",),
    "norm": ("encoder.encoder_norm", "norm"),
    "head": ("classifier", "classifier.3", "head"),
    "head_dist": ("classifier_dist", "head_distill"),
    "pre_logits.fc": ("classifier.0",),  # a hidden layer before classifier.3, in models trained from scratch in 2021
}
TO_TIMM = {name.removeprefix("encoder."): timm for timm, names in NAMES.items() for name in names}
# Paddle stores the weight of a Linear as [in, out], torch as [out, in]. These weights are listed by name, because a
# square shape does not show the order.
LINEAR = re.compile(r"(.*\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)|head|head_dist|pre_logits\.fc)\.weight")


def read_paddle_weights(path: Path) -> Weights:
    """Read PaddleViT's ViT or DeiT weights, of any PaddleViT version, and return them under timm's names."""
    arrays, key = weights_of(read_pdparams(path), path)
    state = {}
    for paddle_name, array in arrays.items():
        name = _timms_name(paddle_name, path)
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise ConfigError(
                f"{path}: {paddle_name} is not an array of floating-point numbers; use another weights file"
            )
        array = array.T if LINEAR.fullmatch(name) else array
        state[name] = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    return Weights(state, key)


def _timms_name(paddle_name: str, path: Path) -> str:
    """Return timm's name for a tensor of PaddleViT."""
    name = re.sub(r"^(transformer\.)?(encoder\.)?", "", paddle_name)
    number = re.search(r"(?<=^layers\.)\d+", name)
    general = name.replace(f".{number[0]}.", ".#.", 1) if number else name
    module, _, leaf = general.rpartition(".")
    if general in TO_TIMM:
        return TO_TIMM[general]
    if module not in TO_TIMM or leaf not in ("weight", "bias"):
        raise ConfigError(
            f"{path}: {paddle_name} is not part of PaddleViT's ViT or DeiT; other models cannot be converted"
        )
    return f"{TO_TIMM[module]}.{leaf}".replace("#", number[0] if number else "")
