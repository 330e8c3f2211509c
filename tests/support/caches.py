"""A folder of photos with a cache that is committed often, and what a start reports about it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from configs.schema import Config
from datasets import CacheProgress, cache_image_sets, load_image_sets
from datasets.cache import file as cache_file
from datasets.types import ImageReadError
from tests.support.configs import replaced
from tests.support.loading import folder_settings

NUM_IMAGES, IMAGES_PER_COMMIT = 21, 4
BROKEN = (2, 11)


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """JPEGs and PNGs of many sizes, two of them cut off; a cache is committed every few images."""
    monkeypatch.setattr(cache_file, "IMAGES_PER_COMMIT", IMAGES_PER_COMMIT)
    root = tmp_path / "photos"
    for part, count in (("train", NUM_IMAGES), ("val", 3)):
        for index in range(count):
            path = root / part / f"class{index % 3}" / f"{index // 3:02}.{'jpg' if index % 2 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = (20 + index, 40 - index, 3)
            gradient = np.add.outer(np.arange(shape[0]) * 3, np.arange(shape[1]) * 2)[:, :, None] + [0, 40, index]
            Image.fromarray(gradient.astype(np.uint8)).save(path)
    for index, path in enumerate(sorted((root / "train").rglob("*.*g"))):
        if index in BROKEN:
            path.write_bytes(path.read_bytes()[:60])
    return root


class Messages:
    """Keeps the lines and warnings of one start."""

    def __init__(self, **options):
        self.lines, self.warnings = [], []
        self.progress = CacheProgress(self.lines.append, self.warnings.append, **options)


def config_of(photos: Path, **data) -> Config:
    defaults = {"CACHE": "disk", "CACHE_PATH": str(photos.parent / "cache"), "IMAGE_SIZE": 16, "MAX_BAD_FRACTION": 0.5}
    return replaced(folder_settings(photos, 2), DATA=defaults | data)


def cached(config: Config, messages: Messages | None = None):
    """The training set."""
    return cache_image_sets(config, load_image_sets(config), (messages or Messages()).progress)[0]


def contents(config: Config) -> dict[str, bytes]:
    folder = Path(config.DATA.CACHE_PATH)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def outcome(image_set, index: int):
    try:
        return image_set.read(index).tolist()
    except ImageReadError as error:
        return str(error)


def files_of(config: Config, part: str = "training") -> set[str]:
    return {name for name in contents(config) if part in name}
