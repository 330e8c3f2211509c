"""Writes a folder in timm's format for the Hugging Face hub. transformers reads it by its wrapper of timm's models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.export.model_card import model_card
from engine.export.subject import Subject
from models.vit import architecture_of
from models.weights.metadata import USUAL
from models.weights.record import OF_PIXELS
from models.weights.torch_files import to_safetensors


def write(subject: Subject, path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_bytes(to_safetensors(subject.model.state_dict(), subject.record))
    text = json.dumps(timm_config(subject), indent=2, ensure_ascii=False)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")
    (path / "README.md").write_text(model_card(subject), encoding="utf-8")


def load(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    """Load the folder with timm."""
    import timm

    with torch.random.fork_rng(devices=[]):
        return subject.in_units(timm.create_model(f"local-dir:{path}", pretrained=True).eval())


def timm_config(subject: Subject) -> dict[str, Any]:
    """Return config.json as timm reads it, and transformers' wrapper of timm's models."""
    settings, data, model = subject.config.MODEL, subject.config.DATA, subject.model
    known = getattr(model, "pretrained_cfg", None) or {"first_conv": "patch_embed.proj", "classifier": "head"}
    layers = {name: known[name] for name in ("first_conv", "classifier", "pool_size") if known.get(name)}
    has_fixed_size = settings.TYPE == "vit" or bool(known.get("fixed_input_size"))
    architecture, arguments = settings.NAME, dict(settings.KWARGS)
    if has_fixed_size:
        arguments["img_size"] = [*data.shape] if isinstance(data.IMAGE_SIZE, str) else data.IMAGE_SIZE
    if settings.TYPE == "vit":
        architecture = f"vit_{USUAL.get(settings.EMBED_DIM, ['base'])[0]}_patch16_224"
        arguments |= architecture_of(settings)
    if data.IMAGE_CHANNELS != 3:
        arguments["in_chans"] = data.IMAGE_CHANNELS  # timm also takes it from input_size, but transformers does not
    # timm does not know the settings of native pixels.
    images = {name: value for name, value in subject.data.items() if name not in OF_PIXELS.values()}
    facts = layers | images | {"num_classes": model.num_classes, "fixed_input_size": has_fixed_size}
    return {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "label_names": subject.labels,
        "problem_type": subject.config.task.problem_type,  # for transformers
        "model_args": arguments,
        "pretrained_cfg": facts | {"custom_load": False},
    }
