"""Rules for all data sets, and data sets without files."""

import numpy as np
import pytest

from tests.support.image_sets import error_of, load, make_folders
from tests.support.in_process import SHIPPED_DIGITS
from tests.support.refusals import assert_names


def test_digits_dataset_ships_with_halfstep(all_digits):
    train, val = load("digits", IMAGE_CHANNELS=1)
    assert (len(train), len(val)) == (1438, 359) and train.classes == [str(digit) for digit in range(10)]
    assert train.storage.in_memory and train.read(0).shape == (8, 8, 1)
    assert (train.storage.images.min(), train.storage.images.max()) == (0, 255)
    shares = np.bincount(val.targets) / (np.bincount(val.targets) + np.bincount(train.targets))
    assert np.all(np.abs(shares - 0.2) < 0.01)
    assert load("digits", VAL_FRACTION=0.5)[1].targets.tolist() == val.targets.tolist()
    with np.load(SHIPPED_DIGITS) as content:
        wanted = np.round(content["images"].astype(int) * 255 / 16).astype(int).tolist()
        assert sorted(zip(wanted, content["targets"].tolist(), strict=True)) == sorted(
            (images.tolist(), target)
            for part in (train, val)
            for images, target in zip(part.storage.images[part.rows], part.targets.tolist(), strict=True)
        )


def test_synthetic_dataset_needs_no_files():
    train, val = load("synthetic", SYNTHETIC_SIZE=50)
    assert len(train) == len(val) == 50 and len(train.classes) == 1000
    assert len(load("synthetic", num_classes=7)[0].classes) == 7


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
