"""CIFAR in torchvision's layout, with two images a file; its expected MD5 sums are replaced by those of these files."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import torchvision.datasets

CLASSES = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}
LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}


def write_cifar(root: Path, name: str) -> Path:
    """Every file of the data set; image i of a file is i at its first pixel's red, and its class is as high."""
    cls = CLASSES[name]
    folder = root / cls.base_folder
    folder.mkdir(parents=True)
    for index, (file, _) in enumerate(cls.train_list + cls.test_list):
        data = np.zeros((2, 3072), np.uint8)
        data[:, 0] = [index, index + 1]  # red of the first pixel
        data[:, 1024 + 1] = 7  # green of the second
        (folder / file).write_bytes(pickle.dumps({"data": data, LABELS[name]: [index, index + 1]}, protocol=2))
    names = {cls.meta["key"]: [f"class_{number}" for number in range(10)]}
    (folder / cls.meta["filename"]).write_bytes(pickle.dumps(names, protocol=2))
    return folder


def expect_these_files(monkeypatch, name: str, folder: Path) -> None:
    """Make torchvision accept the files as they are now: a test cannot make files with the true sums."""
    cls = CLASSES[name]

    def with_sums(files: list[list[str]]) -> list[list[str]]:
        return [[file, hashlib.md5((folder / file).read_bytes()).hexdigest()] for file, _ in files]

    monkeypatch.setattr(cls, "train_list", with_sums(cls.train_list))
    monkeypatch.setattr(cls, "test_list", with_sums(cls.test_list))
    meta_sum = hashlib.md5((folder / cls.meta["filename"]).read_bytes()).hexdigest()
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": meta_sum})
