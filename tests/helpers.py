"""What several tests use: small settings, small runs through the real command line, and the hash of a run."""

import csv
import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from configs.load import load
from configs.schema import Config
from engine.timing import PHASES

ROOT = Path(__file__).parent.parent

# A ViT that trains in milliseconds, on the digits.
SMALL = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.7, 1], BATCH_SIZE: 32, NUM_WORKERS: 0}
MODEL: {TYPE: vit, NAME: vit_small_test, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 1, BASE_LR: 1e-3, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0}
TENSORBOARD: false
"""


def small_config(folder: Path, *options: str) -> Config:
    """The small settings with some changed, by `-opts` words."""
    path = folder / "small.yaml"
    path.write_text(SMALL)
    return load(["-cfg", str(path), *(["-opts", *options] if options else [])]).config


def replaced(config: Config, **sections: dict) -> Config:
    """A copy with settings of some sections changed: replaced(config, TRAIN={"SMOOTHING": 0.1})."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def meta_device() -> torch.device:
    """Tensors without values. The oldest timm that we support reads values while it builds, so not with that one."""
    import pytest
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        try:
            VisionTransformer(depth=1)
        except RuntimeError:
            pytest.skip("this timm cannot build on the meta device")
    return torch.device("meta")


def command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def run(
    script: str, *arguments: str, cwd: Path | None = None, environment: dict | None = None, timeout: float = 180
) -> subprocess.CompletedProcess:
    """An entry script as a person runs it."""
    return subprocess.run(
        command(script, *arguments),
        cwd=cwd or ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_folder(output: Path) -> Path:
    """The one folder that a run made."""
    (folder,) = output.iterdir()
    return folder


# They depend on the machine's mood.
NOT_REPEATABLE = ("images_per_s", "data_wait_pct", "memory_mb", "seconds", *(f"{name}_pct" for name in PHASES))


def run_hash(folder: Path) -> str:
    """sha256 over weights, running mean, optimizer, loss scaler, counters and the metrics of a run."""
    state = torch.load(folder / "last.pth", weights_only=True)
    digest = hashlib.sha256()
    for name in ("state_dict", "state_dict_ema", "optimizer", "amp_scaler", "step", "epoch", "progress"):
        _feed(digest, name, state.get(name))
    for name in ("metrics.csv", "steps.csv"):
        with open(folder / name) as file:
            for row in csv.DictReader(file):
                digest.update(repr([(key, row[key]) for key in row if key not in NOT_REPEATABLE]).encode())
    return digest.hexdigest()


def state_hash(state: dict) -> str:
    """sha256 over all of a checkpoint."""
    digest = hashlib.sha256()
    _feed(digest, "", state)
    return digest.hexdigest()


def _feed(digest, name: str, value) -> None:
    digest.update(name.encode())
    if isinstance(value, dict):
        for key in value:
            _feed(digest, str(key), value[key])
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _feed(digest, str(index), each)
    elif isinstance(value, torch.Tensor):
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())
