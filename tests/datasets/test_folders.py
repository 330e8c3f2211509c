"""Images in class folders, also in Caltech's layouts and ImageNet's, as Kaggle's archive unpacks; its tars."""

import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.image_sets import draw, error_of, load, make_folders, shades
from tests.support.printed import cases_of, same_message
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


@pytest.mark.parametrize("folders", cases_of("mistakes/of_folders"))
def test_wrong_folders_are_named(tmp_path, folders):
    for folder, _, content in (each.partition("=") for each in folders.split()):
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
        if content.isdecimal():
            (tmp_path / folder).mkdir()
            make_folders(tmp_path, {folder: int(content)})
        else:
            (tmp_path / folder).symlink_to(tmp_path / content)
    same_message(error_of("imagefolder", tmp_path, VAL_FRACTION=0.0), "mistakes/of_folders", folders)


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    make_folders(tmp_path, {"train/bee": 1, "val/bee": 1})
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


SYNSETS = ("n01440764", "n01443537", "n02108551")
VAL_SYNSETS = ["n01443537", "n01440764", "n02108551", "n01440764"]  # of each validation image
HEADER = "ImageId,PredictionString\n"


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number + 1:08d}.JPEG"


def write_solution(file: Path, synsets: list[str] = VAL_SYNSETS) -> None:
    """Not in the order of the images, and one of them with two boxes."""
    boxes = [f"{synset} 1 2 3 4 " * (1 + (number == 1)) for number, synset in enumerate(synsets)]
    lines = [f"{Path(val_name(number)).stem},{text}\n" for number, text in enumerate(boxes)]
    file.write_text(HEADER + "".join(reversed(lines)), "utf-8-sig")  # as a spreadsheet saves it


def make_kaggle(root: Path) -> Path:
    """ILSVRC/ and the table beside it; shades of the validation images count from 100."""
    images = root / "ILSVRC" / "Data" / "CLS-LOC"
    for shade in range(12):
        synset = SYNSETS[shade // 4]
        draw(images / "train" / synset / f"{synset}_{shade % 4}.JPEG", shade)
    for number in range(len(VAL_SYNSETS)):
        draw(images / "val" / val_name(number), 100 + number)
    draw(images / "train" / SYNSETS[0] / "more" / "x.JPEG", 50)  # class folders have no other in them
    (images / "val" / "readme.txt").touch()
    write_solution(root / "LOC_val_solution.csv")
    return images


@pytest.mark.parametrize("folder", ["", "ILSVRC"])
def test_kaggles_folders_are_read_where_they_lie_also_when_its_validation_images_are_in_class_folders(tmp_path, folder):
    images = make_kaggle(tmp_path)
    train, val = load("imagenet2012", tmp_path / folder)
    assert train.classes == val.classes == sorted(SYNSETS)
    assert shades(train) == list(range(12)) and train.targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert shades(val) == [100, 101, 102, 103] and val.targets.tolist() == [1, 0, 2, 0]
    (images / "train").rename(tmp_path / "train elsewhere")  # not needed to evaluate
    assert_names(error_of("imagenet2012", tmp_path / folder), "DATA.DATA_PATH", "train/")
    train, val = load("imagenet2012", tmp_path / folder, evaluate=True)
    assert train is None and val.targets.tolist() == [1, 0, 2, 0] and val.classes == sorted(SYNSETS)
    (tmp_path / "train elsewhere").rename(images / "train")
    (tmp_path / "LOC_val_solution.csv").unlink()
    for number, synset in enumerate(VAL_SYNSETS):
        (images / "val" / synset).mkdir(exist_ok=True)
        (images / "val" / val_name(number)).rename(images / "val" / synset / val_name(number))
    _, val = load("imagenet2012", tmp_path)
    assert sorted(zip(shades(val), val.targets.tolist(), strict=True)) == [(100, 1), (101, 0), (102, 2), (103, 0)]


def test_what_is_wrong_with_kaggles_table_is_named(tmp_path):
    images, table = make_kaggle(tmp_path), tmp_path / "LOC_val_solution.csv"
    write_solution(table, [*VAL_SYNSETS, "n01440764"])
    _, val = load("imagenet2012", tmp_path)
    assert_names("\n".join(val.notes), "warning", val_name(4).removesuffix(".JPEG"))
    write_solution(table, VAL_SYNSETS[:3])
    assert_names(error_of("imagenet2012", tmp_path), val_name(3), table)
    write_solution(table, [*VAL_SYNSETS[:3], "n99999999"])
    assert_names(error_of("imagenet2012", tmp_path), val_name(3), "n99999999", table)
    wrong = {"": "line 1", "ImageId,Label\n": "line 1", f"{HEADER}\xff,n01440764\n": "no table"}
    wrong |= {f"{HEADER}{each}\n": "line 2" for each in (",n01440764", f"{val_name(0)},", val_name(0))}
    for text, line in wrong.items():
        table.write_text(text, "latin-1")
        assert_names(error_of("imagenet2012", tmp_path), table, line)
    table.unlink()
    assert_names(error_of("imagenet2012", tmp_path), "DATA.DATA_PATH", "LOC_val_solution.csv", images / "val")


@pytest.mark.parametrize("is_path", [True, False])
def test_tars_are_refused_with_the_command_that_unpacks_them(tmp_path, is_path):
    (tar := tmp_path / "ILSVRC2012_img_train.tar").touch()
    found = error_of("imagenet2012", tar if is_path else tmp_path)
    assert_names(found, "DATA.DATA_PATH", "torchvision", "ILSVRC2012_devkit_t12.tar.gz", "scipy")


def test_plain_class_folders_are_told_to_be_an_image_folder(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    assert_names(error_of("imagenet2012", tmp_path), "DATA.DATA_PATH", "cat", "dog", "-dataset imagefolder")
