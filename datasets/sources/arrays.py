"""Images in memory, and `digits`: 1,797 handwritten digits, which come with halfstep (source, licence: DIGITS.md)."""

from pathlib import Path

import numpy as np
from PIL import Image

from configs.schema import Config
from datasets.pixels import Pixels, pixels_of
from datasets.types import ImageSet

DIGITS = Path(__file__).with_name("digits.npz")
BRIGHTEST = 16  # the highest pixel value in the file
VAL_FRACTION = 0.2  # fixed, so that accuracies are comparable


class ArrayImages(ImageSet):
    """Images in memory: uint8 [N, H, W] or [N, H, W, 3]."""

    in_memory = names_are_numbers = True

    def __init__(self, images: np.ndarray, targets: np.ndarray, classes: list[str], pixels: Pixels, title: str):
        super().__init__(targets, classes)
        self.images, self.pixels, self.title = images, pixels, title

    def name(self, index: int) -> str:
        return f"{self.title} image {index}"

    def table_name(self, index: int) -> str:
        return f"{self.title} image #{self.row(index)}"

    def read(self, index: int) -> np.ndarray:
        image = self.images[self.row(index)]
        pixels = image.reshape(*image.shape[:2], -1)
        if pixels.shape[2] == self.pixels.num_channels:
            return pixels
        from datasets.pixels.decode import to_array

        return to_array(Image.fromarray(image), self.pixels)


def read_digits(config: Config, *_: object) -> tuple[ImageSet, None]:
    """Return all digits. 20% of each class, or a fold, will be held out. DATA_PATH is not used."""
    with np.load(DIGITS, allow_pickle=False) as content:
        images, targets = content["images"], content["targets"]
    images = np.round(images * (255 / BRIGHTEST)).astype(np.uint8)
    classes = [str(digit) for digit in range(10)]
    image_set = ArrayImages(images, targets, classes, pixels_of(config.DATA), "digits")
    return image_set.with_facts(split={"rule": "position", "training": "digits", "fraction": VAL_FRACTION}), None
