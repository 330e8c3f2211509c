"""Small settings that train in milliseconds, and modified copies of settings."""

import dataclasses
from pathlib import Path

import torch
import yaml

from configs.load import LoadedConfig, load
from configs.schema import Config
from models import build_model

CPU = torch.device("cpu")

# A ViT that trains on the digits in milliseconds.
SMALL = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.7, 1], BATCH_SIZE: 32,
       NUM_WORKERS: 0}
MODEL: {TYPE: vit, NAME: vit_small_test, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 1, BASE_LR: 1e-3, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0}
TRACK: []
REPORT: false
"""
# Settings that replace the small ViT by another model.
RESNET = "MODEL.TYPE=timm MODEL.NAME=resnet18 MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"
# A model that classifies 9 of 10 digits correctly after one epoch.
CONVOLUTIONS = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.8, 1], BATCH_SIZE: 32,
       NUM_WORKERS: 0}
MODEL: {TYPE: timm, NAME: test_resnet}
TRAIN: {NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 1e-2, SMOOTHING: 0, MODEL_EMA: true, MODEL_EMA_DECAY: 0.9}
TRACK: []
REPORT: false
"""


def ema(decay: float, warm_up: str = "") -> list[str]:
    """Return -opts words for a run with EMA weights of this decay. `warm_up`: another value than the default."""
    words = ["TRAIN.MODEL_EMA=true", f"TRAIN.MODEL_EMA_DECAY={decay}"]
    return [*words, f"TRAIN.MODEL_EMA_WARMUP={warm_up}"] if warm_up else words


def small_config(folder: Path, *options: str) -> Config:
    """Return the small settings with some changed by `-opts` words."""
    path = folder / "small.yaml"
    path.write_text(SMALL)
    return load(["-cfg", str(path), *(["-opts", *options] if options else [])]).config


def beginning_with_weights(settings: Path, num_classes: int = 10) -> Path:
    """Return a settings file like this one whose runs begin with weights of a file. The weights are random."""
    weights, path = settings.with_name(f"{settings.stem}-begin.pth"), settings.with_name(f"{settings.stem}-begin.yaml")
    torch.manual_seed(0)
    torch.save(build_model(load(["-cfg", str(settings)]).config, num_classes).state_dict(), weights)
    path.write_text(f"BASE: [{settings}]\nMODEL: {{PRETRAINED: {weights}}}\n")
    return path


def write(text: str, name: str = "x.yaml") -> str:
    """Write a settings file in the current folder and return its name."""
    Path(name).parent.mkdir(exist_ok=True, parents=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def load_text(text: str, *words: str) -> LoadedConfig:
    """Load the settings from a file x.yaml with this text, with these words on the command line."""
    return load(["-cfg", write(text), *words])


def yaml_of(values: dict[str, str | list]) -> str:
    """Return the text of a settings file with these values, {full key: value}."""
    sections: dict = {}
    for key, value in values.items():
        *path, name = key.split(".")
        inner = sections
        for each in path:
            inner = inner.setdefault(each, {})
        inner[name] = value
    return yaml.safe_dump(sections)


def replaced(config: Config, **sections: dict) -> Config:
    """Return a copy with settings of some sections changed: replaced(config, TRAIN={"SMOOTHING": 0.1})."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def meta_device() -> torch.device:
    """Return the meta device. Skip the test with the oldest supported timm, which reads values as it builds models."""
    import pytest
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        try:
            VisionTransformer(depth=1)
        except RuntimeError:
            pytest.skip("this timm cannot build on the meta device")
    return torch.device("meta")
