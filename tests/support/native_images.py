"""Images with the values of their files: five 16-bit channels in .npy files, in two classes a model soon learns."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from configs.load import LoadedConfig, load
from configs.schema import Config
from datasets import ImageSet, open_data
from engine.plan import prior_facts_of
from tests.support.configs import replaced
from utils.distributed import Process

CHANNELS, CLASSES = 5, ("ant", "bee")
# A ViT that trains on the images of draw() in milliseconds.
SMALL = """
DATA: {{DATASET: imagefolder, DATA_PATH: {photos}, PIXELS: native, IMAGE_CHANNELS: {channels}, IMAGE_SIZE: 16,
       BATCH_SIZE: 8, NUM_WORKERS: 0}}
MODEL: {{TYPE: vit, NAME: vit_small_test, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2}}
TRAIN: {{NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 3e-3, WEIGHT_DECAY: 0.05}}
TRACK: []
REPORT: false
"""


def pixels(number: int = 0, label: int = 0, channels: int = CHANNELS, size: tuple[int, int] = (32, 36)) -> np.ndarray:
    """Return a noisy image, uint16 [H, W, channels]: each channel is around its own level, which the class shifts."""
    noise = np.random.default_rng([number, label]).integers(300, size=(*size, channels))
    return (noise + 1000 * np.arange(1, channels + 1) + 600 * label).astype(np.uint16)


def write(root: Path, images: Mapping[str, Iterable[np.ndarray]]) -> Path:
    """Write the images of each part as PART/CLASS/NUMBER.npy, with ants and bees in turn. Return the folder."""
    for part, arrays in images.items():
        for number, array in enumerate(arrays):
            folder = root / part / CLASSES[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{number // 2:02}.npy", array)
    return root


def draw(root: Path, train: int = 16, val: int = 8, **options) -> Path:
    """Draw this many images of each part; for the options see `pixels`."""
    count = {"train": range(train), "val": range(100, 100 + val)}
    return write(root, {part: [pixels(each, each % 2, **options) for each in which] for part, which in count.items()})


def files(root: Path, part: str = "train") -> list[Path]:
    """Return the files of a part in the order of the image set."""
    return sorted((root / part).rglob("*.npy"))


def settings(photos: Path, *words: str, channels: int = CHANNELS) -> LoadedConfig:
    """Return the small settings for images in a folder, with these words on the command line."""
    return load(["-cfg", str(settings_file(photos, channels)), *words])


def settings_file(photos: Path, channels: int = CHANNELS) -> Path:
    path = photos.parent / f"{photos.name}.yaml"
    path.write_text(SMALL.format(photos=photos, channels=channels))
    return path


def measured(loaded: LoadedConfig, began: Mapping = {}, process: Process | None = None) -> tuple[Config, ImageSet]:
    """Return the settings with the statistics of the training images, and the validation set with notes about them."""
    wanted = "validation" if loaded.config.EVAL else "both"
    opened = open_data(loaded.config, wanted, prior_facts_of(loaded)._replace(began=began), process)
    return opened.config, opened.val


def config_of(channels: int = CHANNELS, limits: Sequence[float] = (0, 65535), train: Mapping | None = None, **data):
    """Return settings of native images without files, with mean 0.5 and deviation 0.25 unless others are given."""
    same = {"IMAGENET_MEAN": (0.5,) * channels, "IMAGENET_STD": (0.25,) * channels}
    native = {"PIXELS": "uint16", "IMAGE_CHANNELS": channels, "RANGE": tuple(limits), "NUM_WORKERS": 0}
    return replaced(Config(), DATA=native | same | data, TRAIN=dict(train or {}))
