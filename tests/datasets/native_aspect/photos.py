"""Photos of many shapes, and settings of a small NaFlexVit that trains on them in a second."""

from pathlib import Path

import numpy as np
from PIL import Image

from configs.load import load
from configs.schema import Config
from datasets.order import Piece

# width x height
SHAPES = [(64, 64), (96, 64), (64, 96), (80, 60), (60, 80), (200, 50), (50, 200), (300, 30), (33, 47), (640, 12)]
# A NaFlexVit with global average pooling, like timm's naflexvit_base_patch16_gap but smaller.
SMALL = """
DATA: {{DATASET: imagefolder, DATA_PATH: {path}, TOKENS: 24, BATCH_SIZE: 8, NUM_WORKERS: 0}}
MODEL: {{TYPE: timm, NAME: naflexvit_base_patch16_gap, KWARGS: {{patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}}}}
TRAIN: {{NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 1e-3, WEIGHT_DECAY: 0.05}}
TRACK: []
REPORT: false
"""
VIT = (
    "MODEL.TYPE=vit MODEL.NAME=vit MODEL.KWARGS=null MODEL.PATCH_SIZE=8 MODEL.EMBED_DIM=32 MODEL.DEPTH=2 "
    "MODEL.NUM_HEADS=2 DATA.IMAGE_SIZE=32"
).split()
GREY = ("DATA.IMAGE_CHANNELS=1", "DATA.IMAGENET_MEAN=[0.5]", "DATA.IMAGENET_STD=[0.5]")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture with coarse and fine detail."""
    rng = np.random.default_rng([seed, width, height])
    coarse = Image.fromarray(rng.integers(256, size=(4, 4, 3), dtype=np.uint8)).resize((width, height))
    fine = rng.integers(-40, 40, size=(height, width, 3))
    return Image.fromarray((np.asarray(coarse) + fine).clip(0, 255).astype(np.uint8))


def piece_of(count: int, step: int = 5) -> Piece:
    """Return a piece of an epoch with the first `count` images."""
    return Piece(0, np.arange(count), count, step, 0, np.zeros(count, int))


def draw(folder: Path) -> None:
    """Draw two photos of each shape for training, and one for validation, in two classes."""
    for part, number in (("train", 2), ("val", 1)):
        for label, name in enumerate(("bird", "cat")):
            (folder / part / name).mkdir(parents=True)
            for shape in SHAPES:
                for each in range(number):
                    path = folder / part / name / f"{shape[0]}x{shape[1]}-{each}.png"
                    noise(*shape, seed=2 * each + label + 100 * (part == "val")).save(path)


def settings(folder: Path, *options: str) -> Config:
    """Return the small settings with these `-opts` words. The photos are in `folder`/photos."""
    return load(["-cfg", str(written(folder)), *(["-opts", *options] if options else [])]).config


def written(folder: Path) -> Path:
    """Write the small settings for the photos in a folder, and return the file."""
    photos = folder / "photos"
    if not photos.exists():
        draw(photos)
    (folder / "native.yaml").write_text(SMALL.format(path=photos))
    return folder / "native.yaml"
