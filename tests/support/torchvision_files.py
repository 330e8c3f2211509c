"""Small files in the layouts of torchvision's data sets."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets

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


CIFAR = {
    "cifar10": (torchvision.datasets.CIFAR10, "labels"),
    "cifar100": (torchvision.datasets.CIFAR100, "fine_labels"),
}


def write_cifar(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write all files with checksums that torchvision accepts. In training file i, the images have red and class i and
    i + 1, and in the file for validation 0 and 1."""
    cls, labels = CIFAR[name]
    folder = root / cls.base_folder
    folder.mkdir(parents=True)

    def written(file: str, content: dict) -> str:
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
        return hashlib.md5((folder / file).read_bytes()).hexdigest()

    sums = []
    for index, (file, _) in enumerate(cls.train_list + cls.test_list):
        data, numbers = np.zeros((2, 3072), np.uint8), [0, 1] if index == len(cls.train_list) else [index, index + 1]
        data[:, 0] = numbers  # red of the first pixel
        data[:, 1024 + 1] = 7  # green of the second pixel
        sums.append([file, written(file, {"data": data, labels: numbers})])
    names = {cls.meta["key"]: [f"class_{number}" for number in range(10)]}
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": written(cls.meta["filename"], names)})
    monkeypatch.setattr(cls, "train_list", sums[:-1])
    monkeypatch.setattr(cls, "test_list", sums[-1:])
    return folder
