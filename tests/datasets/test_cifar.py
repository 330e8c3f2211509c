"""cifar10 and cifar100: what torchvision reads and refuses, as halfstep hands it on. Downloads: test_torchvision_sets.py."""

import hashlib
import pickle
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torchvision.datasets

from tests.support.image_sets import error_of, load, shades
from tests.support.refusals import assert_names

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


@pytest.mark.parametrize("name", CLASSES)
def test_cifar_has_its_images_in_the_order_of_its_files_with_their_classes(tmp_path, monkeypatch, name):
    expect_these_files(monkeypatch, name, write_cifar(tmp_path, name))
    train, val = load(name, tmp_path)
    num_files = len(CLASSES[name].train_list)
    assert train.targets.tolist() == shades(train) == [each for file in range(num_files) for each in (file, file + 1)]
    assert val.targets.tolist() == shades(val) == [num_files, num_files + 1]
    assert train.classes == val.classes == [f"class_{number}" for number in range(10)] and train.in_memory
    assert train.read(0).shape == (32, 32, 3) and train.read(0)[0, 1].tolist() == [0, 7, 0]
    same = load(f"torchvision/{CLASSES[name].__name__}", tmp_path)[0]
    assert (same.images == train.images).all() and same.classes == train.classes
    assert load(name, tmp_path, evaluate=True)[0] is None


def no_network(data_set) -> None:
    raise URLError("no network")


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("damage", ["missing", "cut off", "one bit", "another pickle"])
def test_a_damaged_cifar_file_is_an_error_with_the_setting_and_the_folder_and_is_not_opened(
    tmp_path, monkeypatch, file, damage
):
    folder = write_cifar(tmp_path, "cifar10")
    expect_these_files(monkeypatch, "cifar10", folder)
    content = (folder / file).read_bytes()
    middle = len(content) // 2
    (folder / file).unlink()
    if damage != "missing":
        one_bit = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        contents = {
            "cut off": content[:-100],
            "one bit": one_bit,
            "another pickle": pickle.dumps(Payload(tmp_path / "ran")),
        }
        (folder / file).write_bytes(contents[damage])
    monkeypatch.setattr(CLASSES["cifar10"], "download", no_network)
    assert_names(error_of("cifar10", tmp_path), "DATA.DATA_PATH", tmp_path, "no network")
    assert not (tmp_path / "ran").exists()
