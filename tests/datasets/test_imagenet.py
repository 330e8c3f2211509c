"""ImageNet as Kaggle's archive unpacks, and its tars: labels, images, and what is refused."""

from pathlib import Path

import pytest

from tests.support.image_sets import draw, error_of, load, shades
from tests.support.refusals import assert_names

SYNSETS = ("n01440764", "n01443537", "n02108551")
VAL_SYNSETS = ["n01443537", "n01440764", "n02108551", "n01440764"]  # of each validation image
HEADER = "ImageId,PredictionString\n"


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number + 1:08d}.JPEG"


def write_solution(file: Path, synsets: list[str] = VAL_SYNSETS) -> None:
    """Not in the order of the images, and one of them with two boxes."""
    boxes = [f"{synset} 1 2 3 4 " * (1 + (number == 1)) for number, synset in enumerate(synsets)]
    lines = [f"{Path(val_name(number)).stem},{text}\n" for number, text in enumerate(boxes)]
    file.write_text(HEADER + "".join(reversed(lines)))


def make_kaggle(root: Path) -> Path:
    """ILSVRC/ and the table beside it; shades of the validation images count from 100."""
    images = root / "ILSVRC" / "Data" / "CLS-LOC"
    for shade in range(12):
        synset = SYNSETS[shade // 4]
        draw(images / "train" / synset / f"{synset}_{shade % 4}.JPEG", shade)
    for number in range(len(VAL_SYNSETS)):
        draw(images / "val" / val_name(number), 100 + number)
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
