"""torchvision/NAME: small files in the layouts that torchvision expects, and what is said when they are not there."""

import inspect
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision.datasets

from datasets import build_train_data, load_image_sets
from datasets.sources.images import ArrayImages, FileImages
from datasets.sources.torchvision_sets import OWN_READERS, SPLITS
from scripts import make_shards
from tests.support.image_sets import draw, error_of, load, make_folders, settings, shades
from tests.support.refusals import assert_names
from tests.support.runs import ROOT
from utils.distributed import Process
from utils.errors import ConfigError


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def make_dtd(root: Path) -> None:
    for shade, name in enumerate(["dotted/d_1.jpg", "banded/b_1.jpg", "banded/b_2.jpg", "dotted/d_2.jpg"]):
        draw(root / "dtd" / "dtd" / "images" / name, shade)
    write(root / "dtd" / "dtd" / "labels" / "train1.txt", "dotted/d_1.jpg", "banded/b_1.jpg")
    write(root / "dtd" / "dtd" / "labels" / "val1.txt", "banded/b_2.jpg", "dotted/d_2.jpg")


def make_aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    for shade in range(3):
        draw(data / "images" / f"000{shade}.jpg", shade)
    write(data / "variants.txt", "707-320", "A380")
    write(data / "images_variant_train.txt", "0000 707-320", "0002 A380")
    write(data / "images_variant_val.txt", "0001 A380")


def make_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    for shade, name in enumerate(["Abyssinian_1", "great_dane_2", "Abyssinian_3", "great_dane_4"]):
        draw(folder / "images" / f"{name}.jpg", shade)
    write(folder / "annotations" / "trainval.txt", "Abyssinian_1 1 1 1", "great_dane_2 2 2 1")
    write(folder / "annotations" / "test.txt", "Abyssinian_3 1 1 1", "great_dane_4 2 2 1")


def make_traffic_signs(root: Path) -> None:
    for shade, name in enumerate(["00000/a.ppm", "00001/b.ppm", "00002/c.ppm"]):
        draw(root / "gtsrb" / "GTSRB" / "Training" / name, shade)
    draw(root / "gtsrb" / "GTSRB" / "Final_Test" / "Images" / "x.ppm", 3)
    write(root / "gtsrb" / "GT-final_test.csv", "Filename;ClassId", "x.ppm;1")


def make_eurosat(root: Path) -> None:
    for number in range(10):
        draw(root / "eurosat" / "2750" / "Forest" / f"{number}.jpg", number)
        draw(root / "eurosat" / "2750" / "River" / f"{number}.jpg", number + 50)


def make_mnist(root: Path) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 3), ("t10k", 2)):
        pixels = np.repeat(np.arange(count, dtype=np.uint8), 28 * 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + bytes([7, 2, 1][:count]))


# name: (its files, targets and shades of training, the same of validation)
LAYOUTS = {
    "DTD": (make_dtd, ([0, 1], [1, 0]), ([0, 1], [2, 3])),
    "FGVCAircraft": (make_aircraft, ([0, 1], [0, 2]), ([1], [1])),
    "OxfordIIITPet": (make_pets, ([0, 1], [0, 1]), ([0, 1], [2, 3])),
    "GTSRB": (make_traffic_signs, ([0, 1, 2], [0, 1, 2]), ([1], [3])),
    "MNIST": (make_mnist, ([7, 2, 1], [0, 1, 2]), ([7, 2], [0, 1])),
}
CLASSES = {
    "DTD": ["banded", "dotted"],
    "FGVCAircraft": ["707-320", "A380"],
    "OxfordIIITPet": ["Abyssinian", "Great Dane"],
    "GTSRB": ["0", "1", "2"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_data_set_is_read_by_its_own_split(tmp_path, name):
    make, *wanted = LAYOUTS[name]
    make(tmp_path)
    parts = load(f"torchvision/{name}", tmp_path)
    assert [(part.targets.tolist(), shades(part)) for part in parts] == wanted
    for part in parts:
        assert part.classes == CLASSES.get(name, part.classes) and len(part.classes) == len(parts[1].classes)
        with ThreadPoolExecutor(4) as pool:
            assert [int(image[0, 0, 0]) for image in pool.map(part.read, range(len(part)))] == shades(part)
    only_val = load(f"torchvision/{name}", tmp_path, evaluate=True)
    assert only_val[0] is None and shades(only_val[1]) == wanted[1][1]


def test_without_a_split_a_share_is_held_out(tmp_path):
    make_eurosat(tmp_path)
    train, val = load("torchvision/EuroSAT", tmp_path, VAL_FRACTION=0.2)
    assert (len(train), len(val)) == (16, 4) and train.classes == ["Forest", "River"]
    assert sorted(shades(train) + shades(val)) == [*range(10), *range(50, 60)]
    assert [shade >= 50 for shade in shades(train)] == train.targets.tolist()


def test_files_are_decoded_by_us_and_arrays_held_in_memory(tmp_path):
    make_dtd(tmp_path)
    make_mnist(tmp_path)
    train, _ = load("torchvision/DTD", tmp_path)
    assert isinstance(train, FileImages) and train.name(0) == str(tmp_path / "dtd/dtd/images/banded/b_1.jpg")
    assert isinstance(load("torchvision/MNIST", tmp_path, IMAGE_CHANNELS=1)[0], ArrayImages)


def test_every_data_set_offered_is_one_of_torchvision_with_these_arguments():
    for name, splits in SPLITS.items():
        parameters = inspect.signature(getattr(torchvision.datasets, name)).parameters
        assert {"root", "download"} <= set(parameters), name
        for arguments in splits:
            assert set(arguments or {}) <= set(parameters), name
    for name in OWN_READERS:
        assert hasattr(torchvision.datasets, name)


def test_pictures_that_torchvision_opens_can_be_trained_on_and_put_into_shards(tmp_path):
    make_pets(tmp_path)
    (tmp_path / "oxford-iiit-pet" / "images" / "great_dane_2.jpg").write_bytes(b"no image")
    config = settings("torchvision/OxfordIIITPet", tmp_path, IMAGE_SIZE=4, BATCH_SIZE=2, NUM_WORKERS=2)
    train, _ = load_image_sets(config)
    windows = build_train_data(config, train, Process(torch.device("cpu"))).windows(0, 1)
    (batch,) = next(windows).batches
    assert set(batch.bad) == {1} and train.name(1) == "OxfordIIITPet image 1"
    draw(tmp_path / "oxford-iiit-pet" / "images" / "great_dane_2.jpg", 1)
    flags = ["-dataset", "torchvision/OxfordIIITPet", "-data_path", str(tmp_path), "-out", str(tmp_path / "out")]
    assert make_shards.main(flags) == 0
    assert sorted(shades(load("shards", tmp_path / "out")[0])) == [0, 1]


def test_caltech_goes_to_our_own_reader_and_says_so(tmp_path):
    make_folders(tmp_path / "101_ObjectCategories", {"ant": 4, "bee": 4})
    train, val = load("torchvision/Caltech101", tmp_path, VAL_FRACTION=0.25)
    assert (len(train), len(val)) == (6, 2) and train.classes == ["ant", "bee"] and "caltech101" in val.notes[1]


# --- mistakes ---


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision/Flowers", r"did you mean Flowers102\?"),
        ("torchvision/oxfordIIITpets", r"did you mean OxfordIIITPet\?"),
        ("torchvision/Kinetics", "torchvision/Kinetics is not one of the supported data sets"),
        ("torchvision", "did you mean torchvision/NAME"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        load(name)


def test_what_is_not_there_is_fetched_once(tmp_path, monkeypatch):
    calls, lines = [], []
    monkeypatch.setattr(
        torchvision.datasets.DTD, "_download", lambda data: calls.append(1) or make_dtd(Path(data.root))
    )
    for _ in range(2):
        train, _ = load_image_sets(settings("torchvision/DTD", tmp_path / "new"), lines.append)
        assert shades(train) == [1, 0]
    assert calls == [1] and len(lines) == 1 and "DTD" in lines[0] and str(tmp_path / "new") in lines[0]


@pytest.mark.parametrize("error", [URLError("no network"), RuntimeError("bad MD5"), ValueError("broken URL")])
def test_a_fetch_that_fails_is_told_without_a_traceback(tmp_path, monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(torchvision.datasets.DTD, "_download", fail)
    message = error_of("torchvision/DTD", tmp_path)
    assert_names(message, "DATA.DATA_PATH", "DTD", tmp_path, error)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(torchvision.datasets, "DTD", fail)
    assert "torchvision/DTD needs a package" in (message := error_of("torchvision/DTD", tmp_path))
    assert "pip install scipy" in message


def test_parts_with_other_classes_are_an_error(tmp_path):
    make_dtd(tmp_path)
    write(tmp_path / "dtd" / "dtd" / "labels" / "val1.txt", "dotted/d_2.jpg")
    assert "DATA.DATA_PATH" in error_of("torchvision/DTD", tmp_path)


def test_torchvision_is_imported_only_for_its_data_sets():
    code = "import datasets.sources.torchvision_sets, sys; sys.exit('torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
