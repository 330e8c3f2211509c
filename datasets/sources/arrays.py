"""Images in memory, and `digits`: 1,797 handwritten digits, which come with halfstep (source, licence: DIGITS.md)."""

from pathlib import Path

import numpy as np
from PIL import Image

from datasets.image_set import Storage, Table
from datasets.pixels import Pixels

DIGITS = Path(__file__).with_name("digits.npz")
BRIGHTEST = 16  # the highest pixel value in the file
VAL_FRACTION = 0.2  # fixed, so that accuracies are comparable


class ArrayStorage(Storage):
    """Images in memory: uint8 [N, H, W] or [N, H, W, 3]."""

    in_memory = names_are_numbers = counts_in_part = True

    def __init__(self, images: np.ndarray, title: str):
        self.images, self.title = images, title

    def __len__(self) -> int:
        return len(self.images)

    def name(self, row: int) -> str:
        return f"{self.title} image {row}"

    def table_name(self, row: int) -> str:
        return f"{self.title} image #{row}"

    def read(self, row: int, pixels: Pixels) -> np.ndarray:
        image = self.images[row]
        values = image.reshape(*image.shape[:2], -1)
        if values.shape[2] == pixels.num_channels:
            return values
        from datasets.pixels.decode import to_array

        return to_array(Image.fromarray(image), pixels)


def read_digits() -> Table:
    """Return all digits. 20% of each class, or a fold, will be held out."""
    with np.load(DIGITS, allow_pickle=False) as content:
        images, targets = content["images"], content["targets"]
    images = np.round(images * (255 / BRIGHTEST)).astype(np.uint8)
    classes = [str(digit) for digit in range(10)]
    split = {"rule": "position", "training": "digits", "fraction": VAL_FRACTION}
    return Table(ArrayStorage(images, "digits"), targets, classes, split=split)
