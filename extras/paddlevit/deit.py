"""Replaces the DeiT of a PaddleViT file with timm's model, and checks that both have the same layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from configs.values import BOOLS, Text, is_none, quoted
from configs.yaml_files import Layer
from utils.errors import ConfigError

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
