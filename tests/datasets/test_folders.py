"""Images in class folders, also in Caltech's layouts."""

import os
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.image_sets import error_of, load, make_folders, shades
from tests.support.refusals import assert_names


@pytest.mark.parametrize("dataset", ["imagenet2012", "imagefolder"])
def test_class_folders_are_numbered_by_the_names_in_train(tmp_path, dataset):
    make_folders(tmp_path / "train", {"cat": 2, "ant": 1, "bee": 1})
    make_folders(tmp_path / "val", {"cat": 1, "bee": 1}, shade=10)
    train, val = load(dataset, tmp_path)
    assert train.classes == val.classes == ["ant", "bee", "cat"]
    assert list(zip(train.targets.tolist(), shades(train), strict=True)) == [(0, 2), (1, 3), (2, 0), (2, 1)]
    assert list(zip(val.targets.tolist(), shades(val), strict=True)) == [(1, 11), (2, 10)]
    only_val = load(dataset, tmp_path, evaluate=True)
    assert only_val[0] is None and only_val[1].targets.tolist() == [1, 2]
    (tmp_path / "train" / "ant" / "00.JPEG").unlink()  # to evaluate, nobody looks for training images
    assert load(dataset, tmp_path, evaluate=True)[1].targets.tolist() == [1, 2]


def test_hidden_folders_and_files_that_are_no_images_are_ignored(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1, "bee": 1, ".ipynb_checkpoints": 1, "bee/more": 1, "bee/.trash": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    (tmp_path / "train" / "ant" / "Thumbs.db").write_bytes(b"no image")
    (tmp_path / "train" / "ant" / "._00.JPEG").write_bytes(b"no image")
    (tmp_path / "train" / "ant" / "loop").symlink_to("loop")
    train, _ = load("imagefolder", tmp_path)
    assert train.classes == ["ant", "bee"] and train.targets.tolist() == [0, 1, 1]


def make_parts(root, val: dict[str, int]) -> None:
    make_folders(root / "train", {"hornet": 1, "bee": 1})
    make_folders(root / "val", val)


# {what is wrong: (makes it, names in the error)}
WRONG = {
    "an empty class": (lambda root: (make_parts(root, {"bee": 1}), (root / "train/bee/00.JPEG").unlink()), ["train/bee"]),
    "an empty class in val": (lambda root: (make_parts(root, {"bee": 1}), (root / "val/bee/00.JPEG").unlink()), ["val/bee"]),
    "a class in val alone": (lambda root: make_parts(root, {"Hornets": 1}), ["val/Hornets", "hornet"]),
    "a class in both": (lambda root: (make_parts(root, {"hornet": 1}), (root / "val/bee").symlink_to(root / "train/bee")), ["val/bee", "train/bee"]),
    "train without val": (lambda root: make_folders(root / "train", {"ant": 4}), ["DATA.DATA_PATH", "val/", "-data_path"]),
    "val without train": (lambda root: make_folders(root / "val", {"ant": 4}), ["DATA.DATA_PATH", "train/"]),
    "nothing to validate": (lambda root: make_folders(root, {"ant": 10, "bee": 20}), ["DATA.VAL_FRACTION", "0"]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_folders_are_named(tmp_path, wrong):
    make, names = WRONG[wrong]
    make(tmp_path)
    assert_names(error_of("imagefolder", tmp_path, VAL_FRACTION=0.0), *names)


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    make_parts(tmp_path, {"bee": 1})
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "Permission denied", "train/bee")))
    assert_names(error_of("imagefolder", tmp_path), "DATA.DATA_PATH", "train/bee")


@pytest.mark.parametrize("parent", ["", "caltech101"])
def test_caltech101_leaves_out_the_background_unless_asked(tmp_path, parent):
    make_folders(
        tmp_path / parent / "101_ObjectCategories", {"BACKGROUND_Google": 10, "Faces": 20, "accordion": 10, ".x": 1}
    )
    train, val = load("caltech101", tmp_path)
    assert train.classes == val.classes == ["Faces", "accordion"]
    assert np.bincount(train.targets).tolist() == [18, 9] and np.bincount(val.targets).tolist() == [2, 1]


def test_caltech256_leaves_out_clutter_and_stray_files(tmp_path):
    folder = tmp_path / "256_ObjectCategories"
    make_folders(folder, {"001.ak47": 10, "056.dog": 10, "257.clutter": 10, "056.dog/greg": 5})
    (folder / "056.dog" / "RENAME2").write_text("stray")
    for path in (tmp_path, folder):
        train, val = load("caltech256", path)
        assert train.classes == ["001.ak47", "056.dog"]
        assert np.bincount(train.targets).tolist() == [9, 9] and np.bincount(val.targets).tolist() == [1, 1]
