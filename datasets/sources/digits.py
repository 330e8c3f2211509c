"""`digits`: 1,797 handwritten digits that are part of halfstep (source and licence: DIGITS.md)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.sources.arrays import ArrayImages
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageSet

FILE = Path(__file__).with_name("digits.npz")
VAL_FRACTION = 0.2  # fixed, so that accuracies are comparable
BRIGHTEST = 16  # the highest pixel value in the file


def read_digits(config: Config, say: Callable = print) -> tuple[ImageSet, None]:
    """Return all images. 20% of each class, or a fold, will be held out. DATA_PATH is not used."""
    with np.load(FILE, allow_pickle=False) as content:
        images, targets = content["images"], content["targets"]
    images = np.round(images * (255 / BRIGHTEST)).astype(np.uint8)
    classes = [str(digit) for digit in range(10)]
    image_set = ArrayImages(images, targets, classes, PixelRules.of(config.DATA), "digits")
    image_set.split = {"rule": "position", "training": "digits", "fraction": VAL_FRACTION}
    return image_set, None
