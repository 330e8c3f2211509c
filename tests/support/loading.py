"""Orders and loaders of small data sets, and their batches as plain values."""

import dataclasses
from pathlib import Path

import numpy as np
from PIL import Image

from configs.schema import Config
from datasets import build_train_data
from datasets.order import Order
from tests.support.configs import CPU, replaced
from tests.support.image_sets import targets_only
from tests.support.opened import open_sets
from utils.distributed import Process


def order(num_images=100, batch_size=8, world_size=1, num_accumulated=1, drop_last=True, seed=0) -> Order:
    epoch_order = targets_only(np.zeros(num_images), ["one"]).epoch_order
    return Order(num_images, batch_size, world_size, num_accumulated, drop_last, seed, epoch_order)


def settings(dataset: str = "digits", path: Path | str = "", seed: int = 0, accumulate: int = 1, **data) -> Config:
    data = {"IMAGE_SIZE": 8, "IMAGE_CHANNELS": 1, "BATCH_SIZE": 100, "NUM_WORKERS": 0, "CROP_PCT": 1.0, **data}
    config = replaced(Config(), DATA={"DATASET": dataset, "DATA_PATH": str(path), **data})
    return dataclasses.replace(replaced(config, TRAIN={"ACCUM_ITER": accumulate}), SEED=seed)


def train_data(config: Config, rank: int = 0, world_size: int = 1):
    return build_train_data(config, open_sets(config)[0], Process(CPU, rank, world_size=world_size))


def first_batch(config: Config):
    windows = train_data(config).windows(0, 1)  # whose loader ends with it
    (batch,) = next(windows).batches
    return batch


def taken(windows) -> list[tuple]:
    """Return the contents of all windows as plain values that can be compared."""
    return [
        (window.step, window.num_samples, batch.images.tolist(), batch.targets.tolist(), batch.num_samples, batch.bad)
        for window in windows
        for batch in window.batches
    ]


def make_folder(root: Path) -> Path:
    """Make nine ants, nine bees, three wasps; image i has red value i. One ant, one bee and all wasps are truncated."""
    for part, counts in (("train", {"ant": 9, "bee": 9, "wasp": 3}), ("val", {"ant": 3, "bee": 3})):
        names = [(name, number) for name, count in counts.items() for number in range(count)]
        for index, (name, number) in enumerate(names):
            file = root / part / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(index).integers(256, size=(12, 14, 3), dtype=np.uint8)
            pixels[:, :, 0] = index
            Image.fromarray(pixels).save(file)
            if number == 2 or name == "wasp":
                file.write_bytes(file.read_bytes()[:100])
    return root


def folder_settings(folder: Path, num_workers: int = 0, **data) -> Config:
    return settings(
        "imagefolder", folder, BATCH_SIZE=5, NUM_WORKERS=num_workers, IMAGE_CHANNELS=3, DROP_LAST=False, **data
    )
