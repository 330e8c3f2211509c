"""ImageNet as Kaggle's archive unpacks and as the official tars: labels, images, and what is refused."""

import pickle
import sys

import numpy as np
import pytest

import main_single_gpu
from scripts import make_shards
from tests.support.image_sets import error_of, load, shades, write_tar
from tests.support.imagenet_files import (
    SYNSETS,
    VAL_SYNSETS,
    class_tars,
    make_kaggle,
    make_official,
    meta_mat,
    val_name,
    write_devkit,
    write_solution,
)
from tests.support.refusals import assert_names
from tests.support.weight_files import Payload
from utils.program import exit_code

WANTED_TARGETS = [2, 0, 1, 0]  # of the validation images, by the order of the names of their classes


def assert_is_imagenet(train, val) -> None:
    assert train.classes == val.classes == sorted(SYNSETS)
    assert shades(train) == list(range(12)) and train.targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert shades(val) == [100, 101, 102, 103] and val.targets.tolist() == WANTED_TARGETS


# --- Kaggle ---


@pytest.mark.parametrize("folder", ["", "ILSVRC"])
def test_kaggles_folders_are_read_where_they_lie(tmp_path, folder):
    make_kaggle(tmp_path)
    assert_is_imagenet(*load("imagenet2012", tmp_path / folder))


def test_validation_images_in_class_folders_need_no_table(tmp_path):
    make_kaggle(tmp_path)
    (tmp_path / "LOC_val_solution.csv").unlink()
    images = tmp_path / "ILSVRC" / "Data" / "CLS-LOC" / "val"
    for number, synset in enumerate(VAL_SYNSETS):
        (images / synset).mkdir(exist_ok=True)
        (images / val_name(number)).rename(images / synset / val_name(number))
    _, val = load("imagenet2012", tmp_path)
    assert sorted(zip(shades(val), val.targets.tolist(), strict=True)) == [(100, 2), (101, 0), (102, 1), (103, 0)]


def test_what_is_wrong_with_kaggles_table_is_named(tmp_path):
    make_kaggle(tmp_path)
    table, images = tmp_path / "LOC_val_solution.csv", tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    write_solution(table, VAL_SYNSETS[:3])
    said = error_of("imagenet2012", tmp_path)
    assert_names(said, val_name(3), str(table))
    assert "None" not in said
    write_solution(table, [*VAL_SYNSETS[:3], "n99999999"])
    assert_names(error_of("imagenet2012", tmp_path), val_name(3), "n99999999", str(table))
    write_solution(table, [*VAL_SYNSETS, "n01440764"])
    _, val = load("imagenet2012", tmp_path)
    assert_names("\n".join(val.notes), "warning", val_name(4).removesuffix(".JPEG"))
    table.write_text("ImageId,Label\n")
    assert_names(error_of("imagenet2012", tmp_path), str(table), "line 1", "ImageId,PredictionString")
    table.write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,\n")
    assert_names(error_of("imagenet2012", tmp_path), str(table), "line 2")
    table.unlink()
    assert_names(error_of("imagenet2012", tmp_path), "DATA.DATA_PATH", "LOC_val_solution.csv", str(images / "val"))


# --- the official tars ---


def test_the_official_tars_are_read_in_place_with_the_classes_of_the_kit(tmp_path):
    make_official(tmp_path)
    train, val = load("imagenet2012", tmp_path)
    assert_is_imagenet(train, val)
    assert train.key(5) == "n01443537_1.JPEG" and train.name(5).startswith(str(tmp_path / "ILSVRC2012_img_train.tar"))
    assert shades(train.take(np.array([2, 7, 9]))) == [2, 7, 9]
    assert load("imagenet2012", tmp_path, evaluate=True)[1].targets.tolist() == WANTED_TARGETS


def test_kaggles_table_may_stand_in_for_the_kit(tmp_path):
    make_official(tmp_path)
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    assert_names(error_of("imagenet2012", tmp_path), "ILSVRC2012_devkit_t12.tar.gz", "LOC_val_solution.csv")
    write_solution(tmp_path / "LOC_val_solution.csv")
    assert_is_imagenet(*load("imagenet2012", tmp_path))


def test_evaluation_needs_no_training_images(tmp_path):
    make_official(tmp_path)
    (tmp_path / "ILSVRC2012_img_train.tar").unlink()
    assert load("imagenet2012", tmp_path, evaluate=True)[1].targets.tolist() == WANTED_TARGETS
    assert_names(error_of("imagenet2012", tmp_path), "DATA.DATA_PATH", "ILSVRC2012_img_train.tar")


@pytest.mark.parametrize("is_one_tar", [False, True])
def test_of_tars_of_classes_without_validation_images_some_are_held_out(tmp_path, is_one_tar):
    path = tmp_path / "all.tar" if is_one_tar else tmp_path
    if is_one_tar:
        write_tar(path, class_tars())
    else:
        for name, content in class_tars().items():
            (tmp_path / name).write_bytes(content)
    train, val = load("imagenet2012", path, VAL_FRACTION=0.3)
    assert sorted(shades(train) + shades(val)) == list(range(12)) and len(val) and train.classes == sorted(SYNSETS)
    assert [shade // 4 for shade in shades(train)] == train.targets.tolist()


def test_truncated_tars_and_kits_that_do_not_fit_are_named(tmp_path):
    make_official(tmp_path)
    kit, val_tar = tmp_path / "ILSVRC2012_devkit_t12.tar.gz", tmp_path / "ILSVRC2012_img_val.tar"
    content = val_tar.read_bytes()
    val_tar.write_bytes(content[:1400])
    assert_names(error_of("imagenet2012", tmp_path), str(val_tar), val_name(3))
    val_tar.write_bytes(content)
    write_devkit(kit, truth=b"3\n1\n")
    assert_names(error_of("imagenet2012", tmp_path), str(val_tar), 4, 2)
    write_devkit(kit, truth=b"3\n1\n4\n1\n")
    assert_names(error_of("imagenet2012", tmp_path), str(kit), "line 3")
    for wrong in (b"no mat file", meta_mat()[:200], pickle.dumps(Payload((tmp_path / "executed").touch))):
        write_devkit(kit, meta=wrong)
        assert_names(error_of("imagenet2012", tmp_path), str(kit), "data/meta.mat")
    assert not (tmp_path / "executed").exists()
    kit.write_bytes(kit.read_bytes()[:100])
    assert_names(error_of("imagenet2012", tmp_path), str(kit))
    write_devkit(kit)
    write_tar(tmp_path / "n01440764.tar", {"README": b"no images"})
    assert_names(error_of("imagenet2012", tmp_path / "n01440764.tar"), str(tmp_path / "n01440764.tar"))
    train_tar = tmp_path / "ILSVRC2012_img_train.tar"
    train_tar.write_bytes(train_tar.read_bytes()[:15000])
    assert_names(error_of("imagenet2012", tmp_path), str(train_tar), "n01440764.tar")


def test_without_scipy_the_error_says_what_to_install(tmp_path, monkeypatch):
    make_official(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert_names(error_of("imagenet2012", tmp_path), "pip install scipy")


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize("make", [make_kaggle, make_official])
def test_a_run_trains_on_them(tmp_path, small_yaml, capsys, make):
    make(tmp_path / "data")
    flags = ["-cfg", str(small_yaml), "-dataset", "imagenet2012", "-data_path", str(tmp_path / "data"), "-epochs", "1"]
    flags += ["-output", str(tmp_path / "run"), "-opts", "DATA.IMAGE_CHANNELS=3", "DATA.BATCH_SIZE=4"]
    assert exit_code(main_single_gpu.main, flags) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("signal_handlers")
def test_shards_of_the_official_tars_have_their_files_and_labels(tmp_path, small_yaml):
    make_official(tmp_path / "tars")
    flags = ["-dataset", "imagenet2012", "-data_path", str(tmp_path / "tars"), "-output", str(tmp_path / "shards")]
    assert exit_code(make_shards.main, flags) == 0
    train, val = load("shards", tmp_path / "shards")
    assert (
        sorted(shades(train)) == list(range(12)) and [shade // 4 for shade in shades(train)] == train.targets.tolist()
    )
    assert train.classes == sorted(SYNSETS) and val.targets.tolist() == WANTED_TARGETS
