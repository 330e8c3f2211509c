"""torchvision/NAME, cifar10 and cifar100: small files in torchvision's layouts, and messages if they are missing."""

import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torchvision.datasets

from datasets.pixels import Pixels
from datasets.sources import torchvision_sets
from datasets.sources.arrays import ArrayStorage
from datasets.sources.images import FileStorage
from datasets.sources.torchvision_sets import OWN_READERS, SPLITS, TorchvisionStorage
from scripts import make_shards
from tests.support.cases import cases_of, names_of
from tests.support.image_sets import draw, error_of, load, make_folders, settings, shades
from tests.support.loading import first_batch
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from tests.support.torchvision_files import CIFAR, make_dtd, make_mnist, make_pets, write, write_cifar
from tests.support.weight_files import Payload
from utils.errors import ConfigError

# {name: (its files, training targets and shades, the same for validation, classes, image class)}
LAYOUTS = {
    "DTD": (make_dtd, ([0, 1], [1, 0]), ([0, 1], [2, 3]), ["banded", "dotted"], FileStorage),
    "OxfordIIITPet": (make_pets, ([0, 1], [0, 1]), ([0, 1], [2, 3]), ["Abyssinian", "Great Dane"], TorchvisionStorage),
    "MNIST": (make_mnist, ([7, 2, 1], [0, 1, 2]), ([7, 2], [0, 1]), None, ArrayStorage),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchvision_set_uses_its_own_split_and_fastest_reader(tmp_path, name):
    make, *wanted, classes, cls = LAYOUTS[name]
    make(tmp_path)
    parts = load(f"torchvision/{name}", tmp_path)
    assert [(part.targets.tolist(), shades(part)) for part in parts] == wanted
    for part in parts:
        assert isinstance(part.storage, cls) and part.classes == (classes or parts[0].classes)
        with ThreadPoolExecutor(4) as pool:
            assert [int(image[0, 0, 0]) for image in pool.map(part.read, range(len(part)))] == shades(part)
    only_val = load(f"torchvision/{name}", tmp_path, evaluate=True)
    assert only_val[0] is None and shades(only_val[1]) == wanted[1][1]


def test_torchvision_set_without_split_holds_out_images(tmp_path):
    for number in range(10):
        draw(tmp_path / "eurosat" / "2750" / "Forest" / f"{number}.jpg", number)
        draw(tmp_path / "eurosat" / "2750" / "River" / f"{number}.jpg", number + 50)
    train, val = load("torchvision/EuroSAT", tmp_path, VAL_FRACTION=0.2)
    assert (len(train), len(val)) == (16, 4) and train.classes == ["Forest", "River"]
    assert sorted(shades(train) + shades(val)) == [*range(10), *range(50, 60)]
    assert [shade >= 50 for shade in shades(train)] == train.targets.tolist()


def test_supported_torchvision_sets_exist_and_accept_the_passed_arguments():
    assert "torchvision" not in vars(torchvision_sets), "must be imported only for its data sets"
    for name, splits in SPLITS.items():
        parameters = inspect.signature(getattr(torchvision.datasets, name)).parameters
        assert {"root", "download"} <= set(parameters), name
        for arguments in splits:
            assert set(arguments or {}) <= set(parameters), name
        train, val = splits
        assert train.get("split", "train").startswith("train") and train.get("train", True) and val != train, name
    for name in OWN_READERS:
        assert hasattr(torchvision.datasets, name)


def test_torchvision_images_can_be_trained_on_and_sharded(tmp_path):
    make_pets(tmp_path)
    (tmp_path / "oxford-iiit-pet" / "images" / "great_dane_2.jpg").write_bytes(b"no image")
    config = settings("torchvision/OxfordIIITPet", tmp_path, IMAGE_SIZE=4, BATCH_SIZE=2, NUM_WORKERS=2)
    train, _ = open_sets(config)
    batch = first_batch(config)
    assert set(batch.bad) == {1} and train.name(1) == "OxfordIIITPet image 1"
    draw(tmp_path / "oxford-iiit-pet" / "images" / "great_dane_2.jpg", 1)
    flags = ["-dataset", "torchvision/OxfordIIITPet", "-data_path", str(tmp_path), "-out", str(tmp_path / "out")]
    assert make_shards.main(flags) == 0
    assert sorted(shades(load("shards", tmp_path / "out")[0])) == [0, 1]


def test_torchvision_caltech101_uses_halfstep_reader(tmp_path):
    make_folders(tmp_path / "101_ObjectCategories", {"ant": 4, "bee": 4})
    train, val = load("torchvision/Caltech101", tmp_path, VAL_FRACTION=0.25)
    assert (len(train), len(val)) == (6, 2) and train.classes == ["ant", "bee"]


# --- CIFAR, whose files are pickles ---


@pytest.mark.parametrize("name", CIFAR)
def test_cifar_images_keep_file_order_and_classes(tmp_path, monkeypatch, name):
    write_cifar(tmp_path, name, monkeypatch)
    train, val = load(name, tmp_path)
    num_files = len(CIFAR[name][0].train_list)
    assert train.targets.tolist() == shades(train) == [each for file in range(num_files) for each in (file, file + 1)]
    assert val.targets.tolist() == shades(val) == [0, 1]
    assert train.classes == val.classes == [f"class_{number}" for number in range(10)] and train.storage.in_memory
    assert f"training images: {name} training, validation: {name} validation" in val.notes[0]
    assert train.read(0).shape == (32, 32, 3) and train.read(0)[0, 1].tolist() == [0, 7, 0]
    same = load(f"torchvision/{CIFAR[name][0].__name__}", tmp_path)[0]
    assert (same.storage.images == train.storage.images).all() and same.classes == train.classes


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_damaged_cifar_file_is_refused_without_unpickling(tmp_path, monkeypatch, file):
    path = write_cifar(tmp_path, "cifar10", monkeypatch) / file
    monkeypatch.setattr(CIFAR["cifar10"][0], "download", Mock(side_effect=URLError("no network")))
    content, middle = path.read_bytes(), path.stat().st_size // 2
    one_bit = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (content[:-100], one_bit, pickle.dumps(Payload((tmp_path / "ran").touch)), None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert_names(error_of("cifar10", tmp_path), "DATA.DATA_PATH", tmp_path, "no network")
    assert not (tmp_path / "ran").exists()


# --- mistakes and missing files ---


@pytest.mark.parametrize("name", cases_of("mistakes-of_torchvision"))
def test_error_for_unknown_torchvision_name_suggests_the_nearest_name(name):
    with refused(ConfigError, *names_of("mistakes-of_torchvision", name)):
        load(name)


def test_missing_torchvision_data_is_downloaded_once(tmp_path, monkeypatch):
    calls, lines = [], []
    monkeypatch.setattr(
        torchvision.datasets.DTD, "_download", lambda data: calls.append(1) or make_dtd(Path(data.root))
    )
    for _ in range(2):
        train, _ = open_sets(settings("torchvision/DTD", tmp_path / "new"), lines.append)
        assert shades(train) == [1, 0]
    assert calls == [1] and len(lines) == 1 and "DTD" in lines[0] and str(tmp_path / "new") in lines[0]


def test_failed_download_or_missing_package_reports_a_remedy(tmp_path, monkeypatch):
    for error in (URLError("no network"), RuntimeError("bad MD5"), ValueError("broken URL")):
        monkeypatch.setattr(torchvision.datasets.DTD, "_download", Mock(side_effect=error))
        assert_names(error_of("torchvision/DTD", tmp_path), "DATA.DATA_PATH", "DTD", tmp_path, error)
    missing = ModuleNotFoundError("No module named 'scipy'", name="scipy")
    monkeypatch.setattr(torchvision.datasets, "DTD", Mock(side_effect=missing))
    assert_names(error_of("torchvision/DTD", tmp_path), "torchvision/DTD", "pip install scipy")


def test_torchvision_parts_with_different_classes_are_refused(tmp_path):
    make_dtd(tmp_path)
    write(tmp_path / "dtd" / "dtd" / "labels" / "val1.txt", "dotted/d_2.jpg")
    assert "DATA.DATA_PATH" in error_of("torchvision/DTD", tmp_path)


def test_channel_first_torchvision_arrays_become_upright_images():
    pixels = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    dataset = SimpleNamespace(data=pixels, labels=np.array([0, 1]))
    table = torchvision_sets._to_table(settings("torchvision/SVHN"), dataset, "SVHN", {})
    assert np.array_equal(table.storage.read(1, Pixels(3)), np.moveaxis(pixels[1], 0, -1))
