"""cifar10 and cifar100: what torchvision reads, downloads and refuses, as halfstep hands it on."""

import os
import pickle
from urllib.error import URLError

import pytest

from datasets import load_image_sets
from tests.support.cifar_files import CLASSES, expect_these_files, write_cifar
from tests.support.image_sets import error_of, load, settings, shades


@pytest.mark.parametrize("name", CLASSES)
def test_cifar_has_its_images_in_the_order_of_its_files_with_their_classes(tmp_path, monkeypatch, name):
    expect_these_files(monkeypatch, name, write_cifar(tmp_path, name))
    train, val = load(name, tmp_path, DOWNLOAD=False)
    num_files = len(CLASSES[name].train_list)
    assert train.targets.tolist() == shades(train) == [each for file in range(num_files) for each in (file, file + 1)]
    assert val.targets.tolist() == shades(val) == [num_files, num_files + 1]
    assert train.classes == val.classes == [f"class_{number}" for number in range(10)] and train.in_memory
    assert train.read(0).shape == (32, 32, 3) and train.read(0)[0, 1].tolist() == [0, 7, 0]
    same = load(f"torchvision/{CLASSES[name].__name__}", tmp_path, DOWNLOAD=False)[0]
    assert (same.images == train.images).all() and same.classes == train.classes
    assert load(name, tmp_path, DOWNLOAD=False, evaluate=True)[0] is None


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("damage", ["missing", "cut off", "one bit"])
def test_a_damaged_cifar_file_is_an_error_with_the_setting_and_the_folder(tmp_path, monkeypatch, file, damage):
    folder = write_cifar(tmp_path, "cifar10")
    expect_these_files(monkeypatch, "cifar10", folder)
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content if damage == "one bit" else content[:-100])
    message = error_of("cifar10", tmp_path, DOWNLOAD=False)
    assert "DATA.DATA_PATH" in message and "DATA.DOWNLOAD" in message and str(tmp_path) in message


@pytest.mark.parametrize("file", ["data_batch_1", "test_batch", "batches.meta"])
def test_a_pickle_in_place_of_a_cifar_file_is_not_opened(tmp_path, monkeypatch, file):
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = write_cifar(tmp_path, "cifar10")
    expect_these_files(monkeypatch, "cifar10", folder)
    (folder / file).write_bytes(pickle.dumps(Payload()))
    error_of("cifar10", tmp_path, DOWNLOAD=False)
    assert not (tmp_path / "ran").exists()


def test_a_missing_cifar_is_downloaded_once_and_reported(tmp_path, monkeypatch):
    write_cifar(tmp_path / "home", "cifar10")
    expect_these_files(monkeypatch, "cifar10", tmp_path / "home" / CLASSES["cifar10"].base_folder)
    downloads, lines = [], []

    def download(dataset) -> None:
        if not downloads:
            write_cifar(tmp_path / "data", "cifar10")
        downloads.append(1)

    monkeypatch.setattr(CLASSES["cifar10"], "download", download)
    assert "DATA.DOWNLOAD" in error_of("cifar10", tmp_path / "data", DOWNLOAD=False) and not downloads
    for _ in range(2):
        assert len(load_image_sets(settings("cifar10", tmp_path / "data"), lines.append)[0]) == 10
    assert downloads == [1] and len(lines) == 1 and str(tmp_path / "data") in lines[0]


@pytest.mark.parametrize("error", [URLError("no network"), RuntimeError("File not found or corrupted.")])
def test_a_failed_download_of_cifar_names_the_folder_and_the_reason(tmp_path, monkeypatch, error):
    def fail(dataset) -> None:
        raise error

    monkeypatch.setattr(CLASSES["cifar10"], "download", fail)
    message = error_of("cifar10", tmp_path)
    assert message.startswith("cifar10: ") and str(tmp_path) in message and str(error) in message
