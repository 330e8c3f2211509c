"""`digits`: 1,797 handwritten digits that are part of halfstep (source and licence: DIGITS.md)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.sources.arrays import ArrayImages
from datasets.split import hold_out
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageSet

FILE = Path(__file__).with_name("digits.npz")
VAL_FRACTION = 0.2  # fixed, so that accuracies are comparable
BRIGHTEST = 16  # the highest pixel value in the file


def read_digits(config: Config, say: Callable = print) -> tuple[ImageSet, ImageSet]:
    """Return 80% of every class for training and 20% for validation, or the parts of a fold. DATA_PATH is not used."""
    with np.load(FILE, allow_pickle=False) as content:
        images, targets = content["images"], content["targets"]
    images = np.round(images * (255 / BRIGHTEST)).astype(np.uint8)
    classes = [str(digit) for digit in range(10)]
    image_set = ArrayImages(images, targets, classes, PixelRules.of(config.DATA), "digits")
    return hold_out(image_set, VAL_FRACTION, "digits", config.DATA.fold)
