"""Handwritten digits with several labels each: properties of the number."""

from pathlib import Path

import numpy as np
from PIL import Image

from datasets.sources.arrays import BRIGHTEST, DIGITS

TRUE_OF = {"even": (0, 2, 4, 6, 8), "loop": (0, 6, 8, 9), "prime": (2, 3, 5, 7), "zero": (0,)}


def write_digits(folder: Path, count: int) -> tuple[Path, list[set[str]]]:
    """Write a CSV file with this many digits. Return it and the labels of each digit; a 1 has none."""
    with np.load(DIGITS) as content:
        images, digits = content["images"][:count], content["targets"][:count]
    labels = [{name for name, numbers in TRUE_OF.items() if digit in numbers} for digit in digits]
    for number, image in enumerate(images):
        Image.fromarray((image * (255 // BRIGHTEST)).astype(np.uint8)).save(folder / f"{number}.png")
    rows = [f"{number}.png,{'|'.join(sorted(each))}" for number, each in enumerate(labels)]
    (folder / "digits.csv").write_text("\n".join(["image_path,target", *rows]) + "\n")
    return folder / "digits.csv", labels
