"""Small teachers, students and photos."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from configs.schema import Config
from configs.values import flatten
from models import build_model
from tests.support.configs import replaced, small_config

# Updates of 16 images of 16 x 16 pixels, and a student with the teacher's grid of 4 x 4 patches.
SMALL = """
DATA: {DATASET: images, IMAGE_SIZE: 16, BATCH_SIZE: 16, BATCH_SIZE_EVAL: 5, NUM_WORKERS: 0, CROP_SCALE: [0.5, 1]}
MODEL: {TYPE: vit, NAME: vit_small_test, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2}
TRAIN: {OBJECTIVE: features, NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 1e-2, MODEL_EMA: true, MODEL_EMA_DECAY: 0.5}
TRACK: []
REPORT: false
REPORT_FREQ: 1
"""
NUM_PHOTOS, COLOURS = 60, "rgb"


def draw_photos(folder: Path, count: int = NUM_PHOTOS, labelled: bool = False, strength: int = 100) -> Path:
    """Draw noisy photos, each in one of three colours, in two folders, or in a folder for each class if `labelled`.

    `strength` of a colour; the noise has values up to 100.
    The folder does not depend on the colour of every fourth photo, so that no model predicts all classes.
    """
    rng = np.random.default_rng(0)
    for number in range(count):
        colour = number % 3
        pixels = rng.integers(0, 100, (20, 24, 3)).astype(np.uint8)
        pixels[..., colour] += strength
        label = COLOURS[(number // 4 if number % 4 == 0 else number) % 3]
        path = folder / (label if labelled else f"trip {number % 2}") / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


def save_teacher(path: Path, config: Config, **model) -> Path:
    """Save a wider model with random weights as a checkpoint of a run."""
    config = replaced(config, MODEL={"EMBED_DIM": 24, "DEPTH": 1, "DROPPATH": None} | model)
    torch.manual_seed(5)
    built = build_model(config, 3)
    with torch.no_grad():
        for parameter in built.parameters():  # larger differences between images
            parameter.normal_(std=0.3)
    content = {"state_dict": built.state_dict(), "config": flatten(config), "class_names": list(COLOURS)}
    torch.save(content, path)
    return path


def teacher_of(folder: Path, **model) -> Path:
    """Return the checkpoint of a teacher for the photos."""
    config = replaced(small_config(folder), DATA={"IMAGE_SIZE": 16, "IMAGE_CHANNELS": 3})
    images = {"IMAGENET_MEAN": (0.4, 0.5, 0.6), "IMAGENET_STD": (0.2, 0.2, 0.2)}
    return save_teacher(folder / "teacher.pth", replaced(config, DATA=images), **model)


def digits_config(folder: Path, *options: str) -> Config:
    """Return settings of a student that learns features of digits, with a teacher in this folder."""
    teacher = save_teacher(folder / "teacher.pth", small_config(folder))
    words = ("TRAIN.OBJECTIVE=features", f"TRAIN.TEACHER_MODEL={teacher}", "TRAIN.WARMUP_EPOCHS=0", *options)
    return small_config(folder, *words)
