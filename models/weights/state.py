"""Weights from a file, renamed as in timm: their key in a checkpoint, checks, and merging of adapters."""

from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from torch import Tensor

from configs.schema import Data
from configs.values import SETTINGS, wrong_in
from models.weights.adapters import BASE_LAYER, merge_adapters
from models.weights.record import PREFERRED, RECORD, VERSION_KEY
from models.weights.sharded import FOLDER, is_plain
from utils.errors import ConfigError, naming_damage
from utils.text import format_bytes

MOST_UNPACKED = 20  # the largest accepted ratio of unpacked to compressed size
SMALL = 10**8  # a model with up to this number of weights is accepted for a file of any size
RESTORE = "restore it, or use another file"  # the remedy in messages about damaged files


class Weights(NamedTuple):
    """The weights in a file, under timm's names."""

    state: dict[str, Tensor]
    key: str = ""  # the key of the weights in the file; '' if the file has only weights
    record: dict = {}  # metadata with the keys of RECORD


# All keys of a halfstep checkpoint with their types. Other programs may use these names differently.
CHECKPOINT = {name: kind for name, kind in RECORD.items() if name not in ("args", "split")} | {
    "epoch": int,
    "step": int,
    "state_dict": dict,
    "preferred": str,
    "optimizer": dict,
    "amp_scaler": dict,
    "progress": dict,
    "bad_images": list,
}


def check_kinds(content: dict, path: Path) -> None:
    """Raise ConfigError if a halfstep checkpoint has values of wrong types."""
    if VERSION_KEY not in content:
        return
    for name, kind in CHECKPOINT.items():
        if name in content and not isinstance(content[name], kind):
            raise ConfigError(f"{path}: damaged ({name} is of type {type(content[name]).__name__}); {RESTORE}")
    check_record(content, path)


def check_record(record: dict, path: Path) -> None:
    """Raise ConfigError if the settings in a record are invalid, or describe a model that would fill the memory."""
    config = record.get("config", {})
    with naming_damage(path):
        if wrong := wrong_in(config):
            raise ValueError(f"{wrong[0]} is {config.get(wrong[0])!r}"[:200])
        if config.get("MODEL.TYPE") == "vit" and _num_weights(config) > MOST_UNPACKED * _size(path) + SMALL:
            raise ValueError(
                f"its settings describe a ViT with {_num_weights(config):.3g} weights, too many for this file"
            )


def _num_weights(config: dict) -> float:
    """Return the approximate number of weights in the blocks and the position embedding of a ViT."""
    keys = ("MODEL.EMBED_DIM", "MODEL.DEPTH", "MODEL.MLP_RATIO", "DATA.IMAGE_SIZE", "MODEL.PATCH_SIZE")
    width, depth, ratio, size, patch = (config.get(key, SETTINGS[key].default) for key in keys)
    shape = Data(IMAGE_SIZE=size).shape
    return width * (depth * width * (4 + 2 * ratio) + shape.height * shape.width / patch**2)


def _size(path: Path) -> int:
    """Return the size of a checkpoint in bytes, including its shards."""
    return sum(each.stat().st_size for each in [path, *path.parent.glob(f"{FOLDER}/*/*")])


def check_tensors(state: dict, path: Path) -> None:
    """Raise ConfigError for values that are not tensors of plain numbers."""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{path}: {name} is not a tensor, so this is not a weights file; use another file")
        if not is_plain(tensor):
            raise ConfigError(
                f"{path}: {name} is sparse, quantized, expanded or without data, not a plain tensor; save it as a "
                "contiguous float32 tensor"
            )
        if name.endswith(".weight") and not tensor.ndim:
            raise ConfigError(f"{path}: {name} is a scalar, not a layer weight; use another file")


# Keys of weights in a checkpoint, best first. timm, PaddleViT and torchvision evaluate and fine-tune the EMA too.
WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")


def weights_of(content, path: Path) -> tuple[dict, str]:
    """Return the dict of weights in a training checkpoint and its key, which is '' if the file has only weights."""
    if isinstance(content, dict):
        keys = [
            key for key in (content.get(PREFERRED), *WEIGHT_KEYS) if isinstance(content.get(key), dict) and content[key]
        ]
        weights, key = (content[keys[0]], keys[0]) if keys else (content, "")
        if all(isinstance(name, str) for name in weights):
            return dict(weights), key
    raise ConfigError(f"{path} contains no weights; save a dict of tensors, alone or under {' or '.join(WEIGHT_KEYS)}")


def refuse_bomb(archive: ZipFile, path: Path) -> None:
    """Raise ConfigError for a zip bomb, which would take minutes or all memory. Real weights hardly compress."""
    size, unpacked = path.stat().st_size, sum(each.file_size for each in archive.infolist())
    if unpacked > MOST_UNPACKED * size + 2**20:
        raise ConfigError(
            f"{path}: refused, because no real weights unpack from {format_bytes(size)} to {format_bytes(unpacked)}; "
            "use another file"
        )


def refusal(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: refused, because it contains more than weights ({what}) and reading it could run code. If you trust "
        "the file, load it with the program that made it and save only the weights as .safetensors"
    )


# The start of the names of layers that halfstep 2 trained without labels. They predict nothing.
FEATURE_MAPS = "feature_maps."


def merged(state: dict[str, Tensor], settings: dict) -> dict[str, Tensor]:
    """Return the weights without feature maps, and with adapters merged in as the `settings` of their run require."""
    state = {name: tensor for name, tensor in state.items() if not name.startswith(FEATURE_MAPS)}
    if not any(BASE_LAYER in name for name in state):
        return state
    return merge_adapters(state, settings)
