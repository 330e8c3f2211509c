"""The class of image sets whose images are all in memory."""

import numpy as np
from PIL import Image

from datasets.transforms.pixel_rules import PixelRules, to_array
from datasets.types import ImageSet


class ArrayImages(ImageSet):
    """Images in memory: uint8 [N, H, W] or [N, H, W, 3]."""

    in_memory = names_are_numbers = True
    per_image = ("targets", "images")

    def __init__(self, images: np.ndarray, targets: np.ndarray, classes: list[str], rules: PixelRules, title: str):
        super().__init__(targets, classes)
        self.images, self.rules, self.title = images, rules, title

    def name(self, index: int) -> str:
        return f"{self.title} image {index}"

    def table_name(self, index: int) -> str:
        return f"{self.title} image #{self.row(index)}"

    def read(self, index: int) -> np.ndarray:
        pixels = self.images[index]
        if pixels.ndim == 3 and pixels.shape[2] == self.rules.num_channels:
            return pixels
        return to_array(Image.fromarray(pixels), self.rules)
