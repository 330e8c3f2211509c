"""ImageNet as Kaggle's archive unpacks, and its tars: labels, images, and what is refused."""

import pytest

import main_single_gpu
from tests.support.image_sets import error_of, load, shades
from tests.support.imagenet_files import SYNSETS, VAL_SYNSETS, make_kaggle, val_name, write_solution
from tests.support.refusals import assert_names
from utils.program import exit_code

WANTED_TARGETS = [2, 0, 1, 0]  # of the validation images, by the order of the names of their classes


def assert_is_imagenet(train, val) -> None:
    assert train.classes == val.classes == sorted(SYNSETS)
    assert shades(train) == list(range(12)) and train.targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert shades(val) == [100, 101, 102, 103] and val.targets.tolist() == WANTED_TARGETS


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


# --- what is refused ---


@pytest.mark.parametrize("is_path", [True, False])
def test_tars_are_refused_with_the_command_that_unpacks_them(tmp_path, is_path):
    (tar := tmp_path / "ILSVRC2012_img_train.tar").touch()
    found = error_of("imagenet2012", tar if is_path else tmp_path)
    assert_names(found, "DATA.DATA_PATH", "torchvision", "ILSVRC2012_devkit_t12.tar.gz", "scipy")


@pytest.mark.usefixtures("signal_handlers")
def test_a_run_trains_on_them(tmp_path, small_yaml, capsys):
    make_kaggle(tmp_path / "data")
    flags = ["-cfg", str(small_yaml), "-dataset", "imagenet2012", "-data_path", str(tmp_path / "data"), "-epochs", "1"]
    flags += ["-output", str(tmp_path / "run"), "-opts", "DATA.IMAGE_CHANNELS=3", "DATA.BATCH_SIZE=4"]
    assert exit_code(main_single_gpu.main, flags) == 0, capsys.readouterr().err
