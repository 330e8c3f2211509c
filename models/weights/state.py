"""The weights in a file under timm's names: where they are in a checkpoint, adapters merged into them, their mean."""

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
from torch import Tensor

from configs.schema import Data
from configs.values import SETTINGS, wrong_in
from models.weights.sharded import FOLDER, is_plain
from utils.errors import ConfigError, naming_damage
from utils.text import format_bytes

MOST_UNPACKED = 20  # times the size of a compressed file
MOST_MEMBERS = 50_000  # with those of an EMA and of an optimizer
SMALL = 10**8  # weights of a model that may be built before it is compared with its file


class Weights(NamedTuple):
    """The weights in a file, under timm's names."""

    state: dict[str, Tensor]
    key: str = ""  # of the weights in the file; '' where it has nothing but weights
    record: dict = {}  # values that RECORD names, of a checkpoint of ours


# Plain values of our checkpoints, and of the files that scripts/export.py makes of them; other programs may have others.
RECORD = {
    "arch": str,
    "class_names": list,
    "split": dict,
    "validation": dict,
    "trained_on": dict,
    "config": dict,
    "data": dict,
    "weights": str,
    "args": dict,  # the command line of timm's and torchvision's training scripts
}

# What our checkpoints hold besides; files of other programs may have other things under these names.
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

# What a run needs to go on, and in its `progress`.
OF_A_RUN = {"epoch", "step", "state_dict", "optimizer", "amp_scaler", "config", "validation", "trained_on"}
PROGRESS = {"best": list, "not_better": int, "left_out": list, "skips_in_a_row": Tensor, "totals": Tensor}
BEST = (float | int, int, float | int, str, int, str)  # engine.evaluation.scores.Best


def check_kinds(content: dict, path: Path) -> None:
    """ConfigError if a checkpoint of ours has something else in place of what its names say, or lacks what a run needs."""
    is_ours = "halfstep_version" in content
    for name, kind in CHECKPOINT.items() if is_ours else ():
        if name in content and not isinstance(content[name], kind):
            raise ConfigError(f"{path}: damaged ({name} is of type {type(content[name]).__name__})")
    if is_ours and content.get("step", 0) < 0:
        raise ConfigError(f"{path}: damaged (step is {content['step']})")
    if is_ours:
        check_record(content, path)
    if is_ours and "progress" in content:
        wrong = OF_A_RUN - content.keys()
        if not content.get("config"):
            wrong.add("config")
        wrong |= {name for name, kind in PROGRESS.items() if not isinstance(content["progress"].get(name), kind)}
        best = () if wrong else content["progress"]["best"]
        if wrong or len(best) != len(BEST) or not all(map(isinstance, best, BEST)):
            raise ConfigError(f"{path}: damaged (without {', '.join(sorted(wrong)) or 'its best epoch'})")


def check_record(record: dict, path: Path) -> None:
    """ConfigError if the settings of a run, or what is saved with them, cannot be of one, or no images be held out by its split."""
    config, split = record.get("config", {}), record.get("split", {})
    with naming_damage(path):
        if wrong := wrong_in(config):
            raise ValueError(f"{wrong[0]} is {config.get(wrong[0])!r}"[:200])
        if config.get("MODEL.TYPE") == "vit" and _num_weights(config) > MOST_UNPACKED * _size(path) + SMALL:
            raise ValueError(f"its settings are of a ViT with {_num_weights(config):.3g} weights")
        if wrong := [fact for fact, value in record.get("trained_on", {}).items() if not isinstance(value, int | str)]:
            raise ValueError(f"its images: {wrong[0]}"[:200])
        if split.get("rule") in ("hash", "position"):
            part = 0 < split.get("fold", 1) <= split.get("folds", 1)
            if not (0 <= split["fraction"] <= 1 and split["seed"] >= 0 and part):
                raise ValueError(f"its split: {split}"[:200])


def _num_weights(config: dict) -> float:
    """About how many weights the blocks and the position embedding of a ViT have."""
    keys = ("MODEL.EMBED_DIM", "MODEL.DEPTH", "MODEL.MLP_RATIO", "DATA.IMAGE_SIZE", "MODEL.PATCH_SIZE")
    width, depth, ratio, side, patch = (config.get(key, SETTINGS[key].default) for key in keys)
    return width * (depth * width * (4 + 2 * ratio) + (side / patch) ** 2)


def _size(path: Path) -> int:
    """The bytes of a checkpoint, with those of its shards."""
    return sum(each.stat().st_size for each in [path, *path.parent.glob(f"{FOLDER}/*/*")])


def check_tensors(state: dict, path: Path) -> None:
    """ConfigError for weights that are none, or not of plain numbers."""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{path}: {name} is not a tensor, so this is not a file of weights")
        if not is_plain(tensor):
            raise ConfigError(
                f"{path}: {name} is not of plain numbers, but sparse, quantized, repeated or without values; save it as "
                "float32, contiguous"
            )
        if name.endswith(".weight") and not tensor.ndim:
            raise ConfigError(f"{path}: {name} is a single number, which is no weight of a layer")


def record_of(content: dict) -> dict:
    plain = {name: vars(value) if isinstance(value, Namespace) else value for name, value in content.items()}
    record = {name: plain[name] for name, kind in RECORD.items() if isinstance(plain.get(name), kind)}
    if not all(isinstance(name, str) for name in record.get("class_names", ())):
        del record["class_names"]
    return record


# A checkpoint's weights, best first: timm, PaddleViT and torchvision evaluate and fine-tune the running mean too.
WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")
PREFERRED = "preferred"  # in our checkpoints: the key of the weights that scored better


def preprocessing_of(data: Data) -> dict[str, Any]:
    """How images are prepared for evaluation, under timm's names."""
    return {
        "mean": list(data.IMAGENET_MEAN),
        "std": list(data.IMAGENET_STD),
        "crop_pct": data.CROP_PCT,
        "crop_mode": data.CROP_MODE,
        "input_size": [data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE],
        "interpolation": data.INTERPOLATION,
    }


def weights_of(content, path: Path) -> tuple[dict, str]:
    """The dict with the weights in a training checkpoint, and its key; '' where the file has nothing but weights."""
    if isinstance(content, dict):
        keys = [
            key for key in (content.get(PREFERRED), *WEIGHT_KEYS) if isinstance(content.get(key), dict) and content[key]
        ]
        weights, key = (content[keys[0]], keys[0]) if keys else (content, "")
        if all(isinstance(name, str) for name in weights):
            return dict(weights), key
    raise ConfigError(f"{path}: no weights found; looked for a dict of tensors, or one under {', '.join(WEIGHT_KEYS)}")


def rename(name: str, table: dict[str, str]) -> str:
    for pattern, replacement in table.items():
        name = re.sub(pattern, replacement, name)
    return name


def join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values become one tensor, as in timm; where one is missing, the model will say so."""
    joined = {}
    for name, tensor in state.items():
        if ".attn.query." in name:
            parts = [state.get(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
            if not any(part is None for part in parts):
                joined[name.replace(".query.", ".qkv.")] = torch.cat(parts)
        elif not re.search(r"\.attn\.(key|value)\.", name):
            joined[name] = tensor
    return joined


def refuse_bomb(archive: ZipFile, path: Path) -> None:
    """ConfigError for a file that would take minutes, a small one also all memory: weights hardly get smaller."""
    if len(archive.infolist()) > MOST_MEMBERS:
        raise ConfigError(f"{path}: refused, because it has more than {MOST_MEMBERS:,} tensors: no weights have")
    size, unpacked = path.stat().st_size, sum(each.file_size for each in archive.infolist())
    if unpacked > MOST_UNPACKED * size + 2**20:
        raise ConfigError(
            f"{path}: refused, because {format_bytes(size)} unpack to {format_bytes(unpacked)}: no weights do"
        )


def refusal(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: refused, because it holds more than weights ({what}) and reading that could run code. Where you trust "
        "the file, load it with the program that made it and save only the weights, as .safetensors"
    )


BASE = ".base_layer."  # where peft keeps the layer beside an adapter


def merged(state: dict[str, Tensor], settings: dict) -> dict[str, Tensor]:
    """The weights with any adapters merged into them. `settings`: those of their run."""
    if not any(BASE in name for name in state):
        return state
    alpha = settings.get("MODEL.LORA.ALPHA")
    if alpha is None:
        raise ConfigError("its adapters (LoRA) are without the settings of their run; use the run's checkpoint")
    plain = {}
    for name, tensor in state.items():
        layer = name.partition(BASE)[0]
        down, up = (state.get(f"{layer}.lora_{letter}.default.weight") for letter in "AB")
        if name == f"{layer}{BASE}weight" and down is not None and up is not None:
            if (*up.shape[:-1], *down.shape[1:]) != tensor.shape:
                raise ConfigError(f"{layer}: its adapter (LoRA) is not of its shape")
            product = up.double() @ down.double()
            tensor = (tensor.double() + alpha / len(down) * product).to(tensor.dtype)
        if ".lora_" not in name:
            plain[name.replace(BASE, ".")] = tensor
    return plain


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean in float64, rounded once to the type of the first state. Running statistics of BatchNorm are averaged
    too, as by timm's avg_checkpoints.py; whole numbers, such as its counters, become the largest."""
    mean = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        if first.is_floating_point():
            mean[name] = (sum(tensor.double() for tensor in tensors) / len(states)).to(first.dtype)
        else:
            mean[name] = torch.stack(tensors).amax(0)
    return mean
