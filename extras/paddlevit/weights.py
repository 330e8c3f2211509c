"""Reads PaddleViT's .pdparams files without executing anything from the file, and converts names to timm's.

Such a file is a pickle, and a pickle may call any Python function by name. This reader allows only a few names, and
replaces even these with its own functions, because numpy's constructors trust the layout of a dtype in the file.
"""

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.values import BOOLS, Text, is_none, quoted
from configs.yaml_files import Layer
from models.weights.state import RESTORE, Weights, refusal, weights_of
from utils.errors import ConfigError

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
    ("numpy.core.multiarray", "scalar"): lambda dtype, data: _from_buffer(data, dtype, (), "C").array.item(),
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


# --- DeiT ---


DISTILLATION = "TRAIN.DISTILLATION_TYPE"
SECTIONS = ("MODEL.TRANS.", "MODEL.")  # sections that may describe the layers
OLD_NAMES = {"HIDDEN_SIZE": "EMBED_DIM", "NUM_LAYERS": "DEPTH"}  # {PaddleViT's name in 2021: today's name}

# Defaults from PaddleViT's config.py for DeiT. PaddleViT's settings files leave these values out.
DEFAULTS = {
    "TRAIN.NUM_EPOCHS": "300",
    "TRAIN.WARMUP_EPOCHS": "5",
    "TRAIN.WEIGHT_DECAY": "0.05",
    "TRAIN.BASE_LR": "5e-4",
    "TRAIN.WARMUP_START_LR": "1e-6",
    "TRAIN.END_LR": "0.0",
    "TRAIN.LINEAR_SCALED_LR": "512",
    "TRAIN.MODEL_EMA": "true",
    "TRAIN.MODEL_EMA_DECAY": "0.99996",
    "TRAIN.SMOOTHING": "0.1",
    "TRAIN.COLOR_JITTER": "0.4",
    "TRAIN.RAND_AUGMENT": "true",
    "TRAIN.MIXUP_ALPHA": "0.8",
    "TRAIN.CUTMIX_ALPHA": "1.0",
    "TRAIN.RANDOM_ERASE_PROB": "0.25",
    "DATA.IMAGENET_MEAN": "[0.485, 0.456, 0.406]",
    "DATA.IMAGENET_STD": "[0.229, 0.224, 0.225]",
}

# {field in a settings file: function that returns its value in timm's model}
FIELDS: dict[str, Callable[[Any], float]] = {
    "PATCH_SIZE": lambda model: model.patch_embed.patch_size[0],
    "EMBED_DIM": lambda model: model.embed_dim,
    "DEPTH": lambda model: len(model.blocks),
    "NUM_HEADS": lambda model: model.blocks[0].attn.num_heads,
    "MLP_RATIO": lambda model: model.blocks[0].mlp.fc1.out_features / model.embed_dim,
    "QKV_BIAS": lambda model: model.blocks[0].attn.qkv.bias is not None,
}


@dataclass(frozen=True)
class Deit:
    """A DeiT as described by a PaddleViT file."""

    origin: str  # the file that sets MODEL.TYPE
    fields: dict[str, tuple[str, Text]]  # {field: (its key in the file, its value)}

    def agree(self, name: str) -> str:
        """Compare timm's model of this name with the file. Return a log line, or raise ConfigError if they differ."""
        import timm  # local: importing timm and torch takes seconds, and only these files need them
        import torch

        name = name.partition(".")[0]  # without the tag of the weights
        if not timm.is_model(name):
            raise ConfigError(
                f"MODEL.NAME is {name!r}, but timm has no model of this name; leave out MODEL.NAME to use "
                f"{self.origin}'s model"
            )
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except RuntimeError:  # timm 1.0.20 reads weights while it builds some models; meta tensors have no values
            model = timm.create_model(name)
        for field, (key, text) in self.fields.items():
            if not _is_same(text, found := FIELDS[field](model)):
                raise ConfigError(
                    f"{self.origin}: {key} is {quoted(text)}, but timm's {name} has {found}; correct MODEL.NAME, or "
                    f"remove {key} to train timm's model"
                )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return (
            f"{self.origin}: MODEL.TYPE deit is built as timm's {name}, {parameters:,} parameters with 1000 classes; "
            f"compared with the file: {', '.join(self.fields) or 'nothing, because it has no fields'}"
        )


def take_deit(files: list[Layer], command_line: list[Layer]) -> tuple[list[Layer], Deit | None]:
    """Replace PaddleViT's DeiT with timm's model in the config layers, and put PaddleViT's defaults below them.

    Return the layers and the DeiT, or the unchanged layers and None if the files do not describe a DeiT that timm has.
    """
    typed = next((layer for layer in reversed(files) if "MODEL.TYPE" in layer.texts), None)
    if not typed or _word(typed.texts["MODEL.TYPE"]) != "deit" or not (name := timm_name(_last(files, "MODEL.NAME"))):
        return files, None
    if (kind := _word(_last(command_line, "MODEL.TYPE"))) not in ("", "timm"):
        raise ConfigError(
            f"MODEL.TYPE is {kind} on the command line, but deit in {typed.origin}; leave MODEL.TYPE out of the "
            "command line"
        )
    if not is_none(_last([*files, *command_line], DISTILLATION)):
        name = timm_name(name.replace("_patch", "_distilled_patch")) or name
    fields: dict[str, tuple[str, Text]] = {}
    layers = [Layer("PaddleViT's defaults for deit", DEFAULTS)]
    for layer in files:
        texts = dict(layer.texts)
        for key in layer.texts:
            if key in ("MODEL.TYPE", "MODEL.NAME"):
                del texts[key]
            elif field := _field(key):
                fields[field] = (key, texts.pop(key))
        if layer is typed:
            texts |= {"MODEL.TYPE": "timm", "MODEL.NAME": name}
        layers.append(replace(layer, texts=texts))
    return layers, Deit(typed.origin, fields)


def timm_name(text: Text | None) -> str:
    """Return timm's name of a model that PaddleViT writes with capitals and hyphens, or '' if timm does not have it."""
    from utils.torch_internals import import_timm  # local: importing torch takes seconds

    name = _word(text).replace("-", "_")
    return name if import_timm().is_model(name) else ""


def _field(key: str) -> str | None:
    """Return the name in FIELDS for this key of a file, or None."""
    section = next((each for each in SECTIONS if key.startswith(each)), "")
    name = key.removeprefix(section)
    name = OLD_NAMES.get(name, name)
    return name if section and name in FIELDS else None


def _last(layers: list[Layer], key: str) -> Text:
    """Return the key's text in the last layer that has it, or an empty string."""
    return next((layer.texts[key] for layer in reversed(layers) if key in layer.texts), "")


def _word(text: Text | None) -> str:
    return text.strip().lower() if isinstance(text, str) else ""


def _is_same(text: Text, found: float) -> bool:
    """Return whether a file's text equals the value in timm's model."""
    word = _word(text)
    if isinstance(found, bool):
        return BOOLS.get(word) is found
    try:
        return float(word) == found
    except ValueError:
        return False
