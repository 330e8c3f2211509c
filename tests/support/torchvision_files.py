"""Small files in the layouts of torchvision's data sets."""

import struct
from pathlib import Path

import numpy as np

from tests.support.image_sets import draw


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def make_dtd(root: Path) -> None:
    for shade, name in enumerate(["dotted/d_1.jpg", "banded/b_1.jpg", "banded/b_2.jpg", "dotted/d_2.jpg"]):
        draw(root / "dtd" / "dtd" / "images" / name, shade)
    write(root / "dtd" / "dtd" / "labels" / "train1.txt", "dotted/d_1.jpg", "banded/b_1.jpg")
    write(root / "dtd" / "dtd" / "labels" / "val1.txt", "banded/b_2.jpg", "dotted/d_2.jpg")


def make_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    for shade, name in enumerate(["Abyssinian_1", "great_dane_2", "Abyssinian_3", "great_dane_4"]):
        draw(folder / "images" / f"{name}.jpg", shade)
    write(folder / "annotations" / "trainval.txt", "Abyssinian_1 1 1 1", "great_dane_2 2 2 1")
    write(folder / "annotations" / "test.txt", "Abyssinian_3 1 1 1", "great_dane_4 2 2 1")


def make_mnist(root: Path) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 3), ("t10k", 2)):
        pixels = np.repeat(np.arange(count, dtype=np.uint8), 28 * 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + bytes([7, 2, 1][:count]))
