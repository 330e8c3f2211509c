"""Each layout of the zoo is read right or refused by name: by the image sets themselves and by -check."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.check.quick_checks import OK, WARN, WRONG
from tests.data_zoo import layouts as zoo
from tests.support.configs import SMALL
from tests.support.image_sets import error_of, load
from tests.support.refusals import assert_names
from tests.support.runs import rows, typed


class Case(NamedTuple):
    """What becomes of a data set. `names`: what the lines about it name; `wrong`: the error names them."""

    make: Callable[[Path], Path]
    names: list[str] = []
    dataset: str = "imagefolder"
    classes: list[str] = zoo.NAMES
    count: int | None = None  # of all images
    wrong: bool = False
    warns: bool = False


NUMBERED, TWO = ["0", "1", "2"], ["ant", "bee"]
WRAPPED = ["download/v2/train/train", "download/v2/val"]
REPEATED = zoo.csv_lines(TWO) + "./images/0.png,bee\n"
CASES = [
    Case(zoo.parts("train", "valid", "test"), ["train", "valid", "not read", "test"], count=12),
    Case(zoo.parts("Train", "Val"), ["Train", "Val"], count=12),
    Case(zoo.parts("training", "dev", "eval"), ["training", "eval", "not read", "dev"], count=12),
    Case(zoo.parts("train", "test"), ["train", "test"], count=12, warns=True),
    Case(zoo.unpacked_twice, ["photos/photos"], count=36),
    Case(zoo.unpacked_into_itself, ["ant, bee, cat"], wrong=True),
    Case(zoo.parts(*WRAPPED), WRAPPED, count=12),
    Case(zoo.flat("ant"), ["DATA.DATA_PATH", "ant", "-data_path"], wrong=True),
    Case(zoo.one_level_too_deep, ["ant", "class folders"], wrong=True),
    Case(zoo.thumbnails, ["thumbnails"], classes=[*zoo.NAMES, "thumbnails"], count=48, warns=True),
    Case(zoo.linked, ["links", "3 files"], classes=[*zoo.NAMES, "dog"], count=54, warns=True),
    Case(zoo.linked_class_twice, ["kitty"], wrong=True),
    Case(zoo.linked_validation, ["train", "val"], wrong=True),
    Case(zoo.linked_validation_class, ["cat"], wrong=True),
    Case(zoo.flat("0", "1", "2", "10"), ["0, 1, 2, 10"], classes=["0", "1", "2", "10"], count=48),
    Case(zoo.flat("my ant", "your  bee", " cat"), classes=[" cat", "my ant", "your  bee"], count=36),
    Case(zoo.decomposed_in_val, classes=zoo.UNICODE, count=12),
    Case(zoo.flat("k\u00e4fer", "ka\u0308fer", "bee"), ["Unicode's"], wrong=True),
    Case(zoo.unread_endings, [".cr2 10", ".txt 1", "beside the class folders 1", "12 files"], count=36, warns=True),
    Case(zoo.only_unread_endings, ["dog", ".cr2"], wrong=True),
    Case(zoo.of_csv(zoo.csv_lines(["0", "1.0", "2"])), ["all.csv"], "csv", NUMBERED, 24),
    Case(zoo.of_csv(zoo.csv_lines(["nan", "0", "1", "2"])), ["line 2", "nan"], "csv", wrong=True),
    Case(zoo.of_csv(zoo.csv_lines(["0", "1", "5?"])), ["line 4", "5?"], "csv", wrong=True),
    Case(zoo.of_csv(zoo.csv_lines(TWO, ";"), header="image_path;target\n"), ["semicolons"], "csv", TWO, 24),
    Case(zoo.of_csv(zoo.csv_lines(TWO, "\t"), header="image_path\ttarget\n"), ["tabs"], "csv", TWO, 24),
    Case(zoo.of_csv(zoo.csv_lines(TWO), "utf-16"), ["UTF-16"], "csv", TWO, 24),
    Case(zoo.of_csv(zoo.csv_lines(TWO), "utf-16-le"), ["all.csv", "UTF-16"], "csv", wrong=True),
    Case(zoo.of_csv("images/1, small.png,ant\n"), ["line 2"], "csv", wrong=True),
    Case(zoo.of_csv(REPEATED), ["1, 1 of them with another class", "images/0.png"], "csv", TWO, 25, warns=True),
    Case(zoo.csv_parts("train.csv", "Valid.csv", "test.csv"), ["train.csv", "Valid.csv", "test.csv"], "csv", TWO, 24),
    Case(zoo.csv_parts("train.csv", "val.csv", overlap=3), ["3 (images/9.png"], "csv", TWO, 24, warns=True),
    Case(zoo.csv_parts("train.csv", "val.csv", overlap=12), ["val.csv", "train.csv"], "csv", wrong=True),
    Case(zoo.tars("train-0-of-2.tar", "valid-0-of-1.tar", "test-0.tar"), ["not read", "test"], "shards", NUMBERED, 60),
    Case(zoo.tars("training-0.tar", "training-1.tar", "dev-0.tar", "extra.tar"), ["extra"], "shards", NUMBERED, 90),
    Case(zoo.tars("Train/0.tar", "Train/1.tar", "Val/0.tar"), ["Train", "Val"], "shards", NUMBERED, 90),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__qualname__.partition(".")[0])
def test_a_data_set_as_people_have_it_is_read_right_or_refused(tmp_path, case):
    path = case.make(tmp_path / "data")
    if case.wrong:
        assert_names(error_of(case.dataset, path), *case.names)
        return
    train, val = load(case.dataset, path)
    assert_names("\n".join(val.notes), "training images", "validation", *case.names)
    assert any(note.startswith("warning") for note in val.notes) == case.warns
    assert train.classes == val.classes == case.classes and len(train) + len(val) == case.count
    for image_set in (train, val):
        for index in range(len(image_set)):
            image_set.read(index)


@pytest.mark.parametrize("make", [zoo.unpacked_twice, zoo.thumbnails, zoo.linked_class_twice])
def test_check_says_of_it_what_a_run_says(tmp_path, make):
    (case,) = (each for each in CASES if each.make == make)
    (tmp_path / "small.yaml").write_text(SMALL.replace("IMAGE_CHANNELS: 1", "IMAGE_CHANNELS: 3"))
    flags = ["-cfg", tmp_path / "small.yaml", "-output", tmp_path / "out", "-dataset", case.dataset]
    ended = typed("main_single_gpu.py", *flags, "-data_path", make(tmp_path / "data"), "-check")
    row, verdict = ("data", WRONG) if case.wrong else ("data set", WARN if case.warns else OK)
    found = rows(ended.stdout)[row]
    assert found[0] == verdict and ended.returncode == (2 if case.wrong else 0)
    assert_names(found[1], *case.names)
