"""Each layout of the zoo is read correctly or refused by name, when loading and by -check."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.quick_checks import OK, WRONG
from tests.runs.data_zoo import layouts as zoo
from tests.support.cases import names_of
from tests.support.configs import SMALL
from tests.support.image_sets import error_of, load
from tests.support.refusals import assert_names
from tests.support.runs import rows, typed

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """The expected result for a data set. Its messages are on a page. `names`: expected from -check."""

    make: Callable[[Path], Path]
    dataset: str = "imagefolder"
    classes: list[str] = zoo.NAMES
    count: int | None = None  # total number of images
    wrong: bool = False
    names: list[str] = []


NUMBERED, TWO = ["0", "1", "2"], ["ant", "bee"]
REPEATED = zoo.csv_lines(TWO) + "./images/0.png,bee\n"
CASES = [
    Case(zoo.parts("train", "valid", "test"), count=12),
    Case(zoo.parts("Train", "Val"), count=12),
    Case(zoo.parts("training", "dev", "eval"), count=12),
    Case(zoo.parts("train", "test"), count=12),
    Case(zoo.unpacked_twice, count=36, names=["photos/photos"]),
    Case(zoo.unpacked_into_itself, wrong=True),
    Case(zoo.parts("download/v2/train/train", "download/v2/val"), count=12),
    Case(zoo.flat("ant"), wrong=True),
    Case(zoo.one_level_too_deep, wrong=True),
    Case(zoo.with_system_folders, count=36),
    Case(zoo.linked, classes=[*zoo.NAMES, "dog"], count=54),
    Case(zoo.linked_class_twice, wrong=True, names=["kitty"]),
    Case(zoo.linked_validation, wrong=True),
    Case(zoo.flat("0", "1", "2", "10"), classes=["0", "1", "2", "10"], count=48),
    Case(zoo.flat("my ant", "your  bee", " cat"), classes=[" cat", "my ant", "your  bee"], count=36),
    Case(zoo.decomposed_in_val, classes=zoo.UNICODE, count=12),
    Case(zoo.flat("k\u00e4fer", "ka\u0308fer", "bee"), classes=["bee", "k\u00e4fer"], count=36),
    Case(zoo.unread_endings, count=36),
    Case(zoo.only_unread_endings, wrong=True),
    Case(zoo.of_csv(zoo.csv_lines(["0", "1.0", "2"])), "csv", NUMBERED, 24),
    Case(zoo.of_csv(zoo.csv_lines(["nan", "0", "1", "2"])), "csv", wrong=True),
    Case(zoo.of_csv(zoo.csv_lines(["0", "1", "5?"])), "csv", wrong=True),
    Case(zoo.of_csv(zoo.csv_lines(TWO, ";"), header="image_path;target\n"), "csv", TWO, 24),
    Case(zoo.of_csv(zoo.csv_lines(TWO, "\t"), header="image_path\ttarget\n"), "csv", TWO, 24),
    Case(zoo.of_csv(zoo.csv_lines(TWO), "utf-16"), "csv", TWO, 24),
    Case(zoo.of_csv(zoo.csv_lines(TWO), "utf-16-le"), "csv", wrong=True),
    Case(zoo.of_csv("images/1, small.png,ant\n"), "csv", wrong=True),
    Case(zoo.of_csv(REPEATED), "csv", TWO, 25),
    Case(zoo.csv_parts("train.csv", "Valid.csv", "test.csv"), "csv", TWO, 24),
    Case(zoo.csv_parts("train.csv", "val.csv", overlap=3), "csv", TWO, 24),
    Case(zoo.csv_parts("train.csv", "val.csv", overlap=12), "csv", wrong=True),
    Case(zoo.tars("train-0-of-2.tar", "valid-0-of-1.tar", "test-0.tar"), "shards", NUMBERED, 60),
    Case(zoo.tars("training-0.tar", "training-1.tar", "dev-0.tar", "extra.tar"), "shards", NUMBERED, 90),
    Case(zoo.tars("Train/0.tar", "Train/1.tar", "Val/0.tar"), "shards", NUMBERED, 90),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__qualname__.partition(".")[0])
def test_common_dataset_layout_is_read_correctly_or_refused(tmp_path, case, request):
    path, named = case.make(tmp_path / "data"), request.node.callspec.id
    if case.wrong:
        assert_names(error_of(case.dataset, path), *names_of("data_zoo", named))
        return
    train, val = load(case.dataset, path)
    assert_names("\n".join(val.notes), *names_of("data_zoo", named))
    assert train.classes == val.classes == case.classes and len(train) + len(val) == case.count
    for image_set in (train, val):
        for index in range(len(image_set)):
            image_set.read(index)


@pytest.mark.parametrize("make", [zoo.unpacked_twice, zoo.linked_class_twice])
def test_check_agrees_with_a_run_about_each_layout(tmp_path, make):
    (case,) = (each for each in CASES if each.make == make)
    (tmp_path / "small.yaml").write_text(SMALL.replace("IMAGE_CHANNELS: 1", "IMAGE_CHANNELS: 3"))
    flags = ["-cfg", tmp_path / "small.yaml", "-output", tmp_path / "out", "-dataset", case.dataset]
    ended = typed("main_single_gpu.py", *flags, "-data_path", make(tmp_path / "data"), "-check")
    row, verdict = ("data", WRONG) if case.wrong else ("data set", OK)
    found = rows(ended.stdout)[row]
    assert found[0] == verdict and ended.returncode == (2 if case.wrong else 0)
    assert_names(found[1], *case.names)
