"""What several tests use: small settings, small runs through the real command line, and the hash of a run."""

import dataclasses
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from configs.load import load
from configs.schema import Config
from tests.support.run_hash import run_hash as run_hash  # for the tests
from tests.support.run_hash import state_hash as state_hash

ROOT = Path(__file__).parent.parent.parent

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


def run_timed(script: str, *arguments: str) -> tuple[subprocess.CompletedProcess, float]:
    """`run`, and the processor's seconds that it took: those of the clock depend on what else runs here."""

    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that ended
        return used.ru_utime + used.ru_stime

    before = seconds()
    return run(script, *arguments), seconds() - before
