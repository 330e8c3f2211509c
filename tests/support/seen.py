"""Collects the images that a model sees, however the images of an update are split and read."""

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

from configs.schema import Config
from datasets import Normalize, Preparation, build_train_data
from datasets.types import Mixed
from tests.support.configs import CPU, replaced
from tests.support.opened import open_sets
from utils.distributed import Process

NUM_IMAGES, WINDOW = 45, 32  # two updates per epoch, the second one smaller
SIDE = 12

Seen = dict[tuple[int, int], str]  # {(step, position in the window): digest of pixels and target}


def write_folder(root: Path) -> Path:
    """Write a folder with two classes of images. The first 45 images are for training."""
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES + 2):
        path = root / ("train" if number < NUM_IMAGES else "val") / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(256, size=(3, 4, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((20 + number, 18), Image.Resampling.BICUBIC).save(path)
    return root


def settings(data: dict, train: dict) -> Config:
    shared = {"IMAGE_SIZE": SIDE, "BATCH_SIZE": WINDOW, "NUM_WORKERS": 0, "DROP_LAST": False}
    return replaced(Config(), DATA={**shared, **data}, TRAIN=train)


def seen(config: Config, world_size: int = 1, micro_batches: int = 1, first: int = 0, last: int = 3, **data) -> Seen:
    """Collect the images of these steps from all processes. `micro_batches`: per update; `data`: other settings of loading."""
    found: Seen = {}
    size = WINDOW // world_size // micro_batches
    config = replaced(config, DATA={**data, "BATCH_SIZE": size}, TRAIN={"ACCUM_ITER": micro_batches})
    train_set, prepare = open_sets(config)[0], Preparation(config, Normalize(config.DATA))
    for rank in range(world_size):
        read = build_train_data(config, train_set, Process(CPU, rank, world_size=world_size))
        for window in read.windows(first, last):
            for batch in window.batches:
                if batch.num_samples:
                    images, targets = prepare(batch)
                    parts = targets if isinstance(targets, Mixed) else (targets,)
                    for number, image in enumerate(images):
                        told = image.numpy().tobytes() + repr([each[number].item() for each in parts]).encode()
                        key = window.step, batch.piece.first + number
                        assert key not in found, "two processes see the same image"
                        found[key] = hashlib.sha1(told).hexdigest()
    return found
