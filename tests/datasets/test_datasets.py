"""Rules for all data sets, and data sets without files."""

import hashlib

import numpy as np
import pytest

from datasets.sources.arrays import DIGITS
from datasets.sources.computed import FRACTAL_CLASSES, cloud_maps, find_system
from tests.support.image_sets import error_of, load, make_folders
from tests.support.refusals import assert_names


def test_digits_dataset_ships_with_halfstep():
    train, val = load("digits", IMAGE_CHANNELS=1)
    assert (len(train), len(val)) == (1438, 359) and train.classes == [str(digit) for digit in range(10)]
    assert train.in_memory and train.read(0).shape == (8, 8, 1)
    assert (train.images.min(), train.images.max()) == (0, 255)
    shares = np.bincount(val.targets) / (np.bincount(val.targets) + np.bincount(train.targets))
    assert np.all(np.abs(shares - 0.2) < 0.01)
    assert load("digits", VAL_FRACTION=0.5)[1].targets.tolist() == val.targets.tolist()
    with np.load(DIGITS) as content:
        wanted = np.round(content["images"].astype(int) * 255 / 16).astype(int).tolist()
        assert sorted(zip(wanted, content["targets"].tolist(), strict=True)) == sorted(
            (images.tolist(), target)
            for part in (train, val)
            for images, target in zip(part.images[part.rows], part.targets.tolist(), strict=True)
        )


def test_synthetic_dataset_needs_no_files():
    train, val = load("synthetic", SYNTHETIC_SIZE=50)
    assert len(train) == len(val) == 50 and len(train.classes) == 1000
    assert len(load("synthetic", num_classes=7)[0].classes) == 7


def test_fractal_images_depend_only_on_class_and_number(tmp_path):
    train, val = load("fractals", SYNTHETIC_SIZE=12, num_classes=6)
    assert (len(train), len(val)) == (12, 6) and train.targets.tolist() == [*range(6), *range(6)]
    pictures = [part.read(index).tobytes() for part in (train, val) for index in range(6)]
    assert len(set(pictures)) == 12  # images within a class differ too, also between training and validation
    digest = hashlib.sha256(b"".join(pictures)).hexdigest()
    assert digest[:16] == "f82e19a58939b6ba"
    many = load("fractals", SYNTHETIC_SIZE=900, num_classes=6, IMAGE_CHANNELS=3)
    assert [*map(len, many)] == [900, 90]
    alone = many[0].take(np.array([5]))
    assert alone.read(0).tobytes() == pictures[5] and alone.targets.tolist() == [5] and alone.name(0).endswith(" 5")
    (tmp_path / "classes.txt").write_text("".join(f"fractal {each}\n" for each in reversed(range(6))))
    renumbered = load("fractals", SYNTHETIC_SIZE=12, num_classes=6, CLASSES=str(tmp_path / "classes.txt"))[0]
    assert renumbered.targets[0] == 5 and renumbered.read(0).tobytes() == pictures[0]
    assert load("fractals", SYNTHETIC_SIZE=12, IMAGE_CHANNELS=1)[0].read(0).shape == (32, 32, 1)


def test_first_image_of_every_fractal_class_stays_the_same():
    """Some classes reach limits that others do not."""
    train, _ = load("fractals", SYNTHETIC_SIZE=200)
    pictures = b"".join(train.read(index).tobytes() for index in range(200))
    assert hashlib.sha256(pictures).hexdigest()[:16] == "aa891a207c7ee0a7"


def test_maps_of_every_fractal_cloud_contract():
    for number in range(2, FRACTAL_CLASSES, 3):
        system = find_system(number)
        maps = cloud_maps(system.num_maps, system.numbers)
        stretched = np.linalg.svd(maps[:, [0, 1, 3, 4]].reshape(-1, 2, 2), compute_uv=False)
        assert not system.num_sides and stretched.max() < 0.9 + 1e-6, number


@pytest.mark.parametrize("dataset", ["imagenet2012", "imagefolder", "csv", "caltech101", "caltech256"])
def test_missing_data_path_error_describes_expected_layout(tmp_path, dataset):
    message = error_of(dataset, tmp_path / "none")
    assert_names(message, "DATA.DATA_PATH", tmp_path / "none", dataset, "-data_path", "docs/data.md")
    # An empty folder is refused as well.
    assert ("docs/data.md" in error_of(dataset, tmp_path)) is (dataset != "imagefolder")


def test_data_with_more_classes_than_model_outputs_is_refused(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1, "bee": 1, "cat": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    message = error_of("imagefolder", tmp_path, num_classes=2)
    assert_names(message, "cat/00.JPEG", "MODEL.NUM_CLASSES", "2", "-num_classes 3")
    assert len(load("imagefolder", tmp_path, num_classes=9)[0].classes) == 3
