"""Reads the weights out of any file that people have, under timm's names, and runs nothing from the file."""

import argparse
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.formats.paddle import read_pdparams, refusal, to_timm
from models.formats.sharded import SHARDS, join
from utils.errors import ConfigError, not_a_file

SUFFIXES = (".pdparams", ".pth", ".safetensors", ".npz")
# A checkpoint's weights, best first: timm, PaddleViT and torchvision evaluate and fine-tune the running mean too.
WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")


def find_file(source: str | Path) -> Path | None:
    """The file of that name, with or without its suffix: PaddleViT once forbade the suffix and later required it."""
    path = Path(source).expanduser()
    for candidate in (path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES)):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        held = sorted(each.name for each in path.iterdir() if each.suffix in SUFFIXES)
        raise ConfigError(f"{path} is a folder; name a file in it{': ' + ', '.join(held) if held else ''}")
    if path.exists():
        raise ConfigError(f"{path} is {not_a_file(path)}; name a file")
    return None


def read_state_dict(source: str | Path) -> dict[str, Tensor]:
    """The weights in a file of any format, under timm's names."""
    return read_weights(source)[0]


def read_weights(source: str | Path) -> tuple[dict[str, Tensor], str]:
    """The weights, and which of WEIGHT_KEYS they were found under. The file's first bytes say what format it has."""
    path = find_file(source)
    if path is None:
        raise ConfigError(f"no file at {source}, nor with {', '.join(SUFFIXES)} added")
    if path.suffix == ".pdopt":
        raise ConfigError(f"{path} holds the state of an optimizer; the weights are in the .pdparams beside it")
    state, key = _READERS[_format(path)](path)
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{path}: {name} is not a tensor, so this is not a file of weights")
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{path}: {name} holds NaN or infinite values; use an earlier checkpoint")
    if not state:
        raise ConfigError(f"{path} holds no weights")
    return state, key


def read_torch(path: Path, lazily: bool = False):
    """What torch.save wrote: tensors and plain values, or an error. Nothing in the file is run.

    A checkpoint in shards is put together; `lazily`: its large tensors as Parts.
    """
    content = _read_torch_file(path)
    if isinstance(content, dict) and isinstance(content.get(SHARDS), list):
        return join(content, path.parent, lambda part: _read_torch_file(part, from_disk=True), lazily)
    return content


def _read_torch_file(path: Path, from_disk: bool = False):
    """`from_disk`: its tensors stay on the disk until they are used."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()  # torch.load does not compare the checksums that torch.save wrote
            if broken:
                raise ConfigError(f"{path}: damaged (checksum of {broken})")
        if from_disk:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # timm, DeiT and torchvision save their command line beside the weights; it is plain data. An open file, since
        # for a path torch goes by the suffix.
        with torch.serialization.safe_globals([argparse.Namespace]), open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in zip or pickle
        forbidden = re.search(r"GLOBAL (\S+)|TorchScript", str(error))
        if forbidden:
            raise refusal(path, forbidden[1] or "TorchScript") from None
        # Not torch's own words: they advise to read the file without this protection.
        raise ConfigError(f"{path}: damaged, or not a file of weights ({type(error).__name__})") from None


def to_safetensors(state: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    from safetensors.torch import save

    # The format knows no tensors that share memory or lie in other than row order.
    return save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}, metadata)


def _format(path: Path) -> str:
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(16)
    if head[:4] == b"PK\x03\x04":
        return "google" if _holds_arrays(path) else "torch"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return "safetensors"
    if head[2:14] == b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19":  # the number that torch.save wrote first until 2020
        return "torch"
    return "paddle"


def _holds_arrays(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile:
        raise ConfigError(f"{path}: damaged or cut off") from None


def _read_torch_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    state, key = _weights_of(read_torch(path), path)
    state.pop("n_averaged", None)  # torch's AveragedModel counts beside its weights
    state = {_without_wrappers(name): tensor for name, tensor in state.items()}
    if "conv_proj.weight" in state:
        state = {_rename(name, TORCHVISION_VIT): tensor for name, tensor in state.items()}
    return state, key


def _read_paddle_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    arrays, key = _weights_of(read_pdparams(path), path)
    return to_timm(arrays, path), key


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], str]:
    import safetensors.torch

    try:
        return safetensors.torch.load_file(path), ""
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: damaged or cut off ({error})") from None


def _weights_of(content, path: Path) -> tuple[dict, str]:
    """The weights among what a training program saved with them; a file of weights alone is its own."""
    if isinstance(content, dict):
        keys = [key for key in WEIGHT_KEYS if isinstance(content.get(key), dict) and content[key]]
        weights, key = (content[keys[0]], keys[0]) if keys else (content, "")
        if all(isinstance(name, str) for name in weights):
            return dict(weights), key
    raise ConfigError(f"{path}: no weights found; looked for a dict of tensors, or one under {', '.join(WEIGHT_KEYS)}")


def _without_wrappers(name: str) -> str:
    """DDP and torch.compile put their own names before a model's, in either order."""
    return re.sub(r"^((module|_orig_mod)\.)+", "", name)


def _rename(name: str, table: dict[str, str]) -> str:
    for pattern, replacement in table.items():
        name = re.sub(pattern, replacement, name)
    return name


TORCHVISION_VIT = {
    r"^class_token$": "cls_token",
    r"^conv_proj\.": "patch_embed.proj.",
    r"^encoder\.pos_embedding$": "pos_embed",
    r"^encoder\.layers\.encoder_layer_(\d+)\.": r"blocks.\1.",
    r"^encoder\.ln\.": "norm.",
    r"^heads\.head\.": "head.",
    r"^heads\.pre_logits\.": "pre_logits.fc.",
    r"\.ln_([12])\.": r".norm\1.",
    r"\.self_attention\.in_proj_(weight|bias)$": r".attn.qkv.\1",
    r"\.self_attention\.out_proj\.": ".attn.proj.",
    r"\.mlp\.(0|linear_1)\.": ".mlp.fc1.",
    r"\.mlp\.(3|linear_2)\.": ".mlp.fc2.",
}


GOOGLE_VIT = {
    r"^(opt/target|params)/": "",
    r"^cls$": "cls_token",
    r"^(Transformer/posembed_input/)?pos_embedding$": "pos_embed",
    r"^embedding/": "patch_embed.proj/",
    r"^pre_logits/": "pre_logits.fc/",
    r"^Transformer/encoder_norm/": "norm/",
    r"^Transformer/encoderblock_(\d+)/": r"blocks.\1.",
    r"\.LayerNorm_0/": ".norm1/",
    r"\.LayerNorm_[12]/": ".norm2/",
    r"\.MultiHeadDotProductAttention_[01]/": ".attn.",
    r"\.attn\.out/": ".attn.proj/",
    r"\.MlpBlock_[03]/Dense_0/": ".mlp.fc1/",
    r"\.MlpBlock_[03]/Dense_1/": ".mlp.fc2/",
    r"/(kernel|scale)$": ".weight",
    r"/bias$": ".bias",
}


def _read_google(path: Path) -> tuple[dict[str, Tensor], str]:
    """The .npz files of Google's vision_transformer."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = {name: _rename(name, GOOGLE_VIT) for name in archive.files}
            state = {new: torch.from_numpy(_torch_layout(new, archive[old])) for old, new in names.items()}
        return _join_qkv(state), ""
    except Exception as error:  # numpy raises what zip, a header or the refused pickle raised
        raise ConfigError(f"{path}: damaged, or not Google's ViT ({type(error).__name__}: {error})") from None


def _torch_layout(name: str, array: np.ndarray) -> np.ndarray:
    """Kernels go from in to out there, and attention's are split into heads of width D."""
    array = array.astype(np.float32)
    if name.endswith(".attn.proj.weight"):
        array = array.reshape(-1, array.shape[-1])  # [heads, D, out]
    elif re.search(r"\.attn\.(query|key|value)\.", name):
        array = array.reshape(*array.shape[:-2], -1)  # [in, heads, D], bias [heads, D]
    if array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)  # [h, w, in, out]
    return np.ascontiguousarray(array.T if array.ndim == 2 else array)


def _join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = {}
    for name, tensor in state.items():
        if ".attn.query." in name:
            parts = [state[name.replace(".query.", f".{part}.")] for part in ("query", "key", "value")]
            joined[name.replace(".query.", ".qkv.")] = torch.cat(parts)
        elif not re.search(r"\.attn\.(key|value)\.", name):
            joined[name] = tensor
    return joined


_READERS = {
    "google": _read_google,
    "torch": _read_torch_weights,
    "safetensors": _read_safetensors,
    "paddle": _read_paddle_weights,
}
