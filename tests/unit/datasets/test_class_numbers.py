"""The number of each class: from DATA.CLASSES, from numeric names, and from a checkpoint."""

import numpy as np
import pytest

from datasets import SavedData
from tests.support.cases import cases_of, content_of, names_of
from tests.support.configs import replaced
from tests.support.image_sets import draw, error_of, load, make_folders, make_set, settings, shades
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError, DataError


def names_by_shade(image_set) -> dict[int, str]:
    """Return {shade of an image: the name of its class}."""
    return {shade: image_set.classes[n] for shade, n in zip(shades(image_set), image_set.targets, strict=True)}


def make_csv(folder, classes: list[str], header: str = "image_path,target", count: int = 24):
    lines = [f"{number}.png,{classes[number % len(classes)]}" for number in range(count)]
    for number in range(count):
        draw(folder / f"{number}.png", number)
    (folder / "all.csv").write_text("\n".join([header, *lines]))
    return folder / "all.csv"


@pytest.mark.parametrize("dataset", ["imagefolder", "csv", "shards"])
def test_classes_file_also_numbers_classes_without_images(tmp_path, dataset):
    (tmp_path / "names.txt").write_text("dog\ncat\nbee\nant\n", "utf-8-sig")
    make_folders(tmp_path / "data", {"ant": 12, "bee": 12, "cat": 12})
    make_set(tmp_path / "data")
    (tmp_path / "data" / "classes.txt").write_text("ant\nbee\ncat\n")
    path = make_csv(tmp_path / "data", ["cat", "ant"]) if dataset == "csv" else tmp_path / "data"
    plain, numbered = load(dataset, path), load(dataset, path, CLASSES=str(tmp_path / "names.txt"))
    for before, after in zip(plain, numbered, strict=True):
        assert after.classes == ["dog", "cat", "bee", "ant"] and names_by_shade(after) == names_by_shade(before)
    (tmp_path / "data" / "classes.txt").unlink()
    by_number = load("shards", tmp_path / "data", CLASSES=str(tmp_path / "names.txt"))[0]
    assert by_number.targets.tolist() == [number % 3 for number in range(30)] and by_number.classes[2] == "bee"
    config = settings("shards", tmp_path / "data", CLASSES=str(tmp_path / "names.txt"))
    kept = SavedData(["bee", "cat", "dog", "ant"], {})
    assert names_by_shade(open_sets(config, saved=kept)[0]) == names_by_shade(by_number)


@pytest.mark.parametrize("text", cases_of("mistakes-in_a_file_of_classes"))
def test_mistakes_in_a_classes_file_are_reported(tmp_path, text):
    make_folders(tmp_path / "data", {"ant": 12, "bee": 12})
    (tmp_path / "names.txt").write_text(content_of(text))
    with refused((ConfigError, DataError), *names_of("mistakes-in_a_file_of_classes", text)):
        load("imagefolder", tmp_path / "data", CLASSES=str(tmp_path / "names.txt"))


@pytest.mark.parametrize("case", cases_of("class_numbers"))
def test_log_names_classes_without_images_or_scores(tmp_path, case):
    """A case is DATA.CLASSES | classes of a checkpoint | -eval. The data has the classes 1, 2 and 10."""
    make_folders(tmp_path / "data", {name: 10 for name in ("1", "2", "10")})
    names, known, evaluate = (each.split() for each in case.split("|"))
    (tmp_path / "names.txt").write_text("\n".join(names))
    file = {"CLASSES": str(tmp_path / "names.txt")} if names else {}
    config = settings("imagefolder", tmp_path / "data", bool(evaluate), **file)
    try:
        told = "\n".join(open_sets(config, saved=SavedData(known, {}) if known else None)[1].notes)
    except DataError as error:
        told = str(error)
    assert_names(told, *names_of("class_numbers", case))


def test_resumed_run_finds_class_names_in_another_unicode_form(tmp_path):
    config = settings("csv", make_csv(tmp_path, ["b\u00e4r", "dog"]))
    for part in open_sets(config, saved=SavedData(["dog", "ba\u0308r"], {})):
        assert part.classes == ["dog", "ba\u0308r"] and set(part.targets) == {0, 1}


def test_missing_invalid_or_leaking_group_column_is_reported(tmp_path):
    classes = [f"{name},{group}" for group in range(12) for name in ("ant", "bee")]
    file = make_csv(tmp_path, classes, "image_path,target,person")
    _, val = load("csv", file, GROUP_BY="person", VAL_FRACTION=0.4)
    kept = SavedData(val.classes, val.split)
    assert_names(open_sets(settings("csv", file, evaluate=True, GROUP_BY="person"), saved=kept)[1].notes[0], "person")
    with refused(ConfigError, "DATA.GROUP_BY", "person"):
        open_sets(settings("csv", file, evaluate=True), saved=kept)
    assert_names(error_of("csv", file, GROUP_BY="family"), "all.csv, line 1", "family")
    for part in ("train", "val"):
        header, *rows = make_csv(tmp_path / part, classes, "image_path,target,person").read_text().splitlines()
        (tmp_path / f"{part}.csv").write_text("\n".join([header, *(f"{part}/{row}" for row in rows)]))
    _, val = load("csv", tmp_path, GROUP_BY="person")
    assert [note for note in val.notes if note.startswith("warning") and "DATA.GROUP_BY" in note and "11" in note]


def test_data_with_one_class_needs_a_checkpoint_with_more_classes(tmp_path):
    make_folders(tmp_path, {"ant": 12})
    for evaluate in (False, True):
        assert_names(error_of("imagefolder", tmp_path, evaluate), "DATA.DATA_PATH", "ant")
    config = settings("imagefolder", tmp_path, evaluate=True)
    assert np.all(open_sets(config, saved=SavedData(["bee", "ant"], {}))[1].targets == 1)


def test_class_names_differing_only_in_case_or_spaces_cause_warning(tmp_path):
    for classes in (["cat", "Cat", "dog"], ["maine_coon", "Maine  Coon", "dog"]):
        _, val = load("csv", make_csv(tmp_path, classes))
        assert len(val.classes) == 3
        (warning,) = [note for note in val.notes if note.startswith("warning")]
        assert_names(warning, *classes[:2])
    assert len(load("csv", make_csv(tmp_path, ["b\u00e4r", "ba\u0308r", "dog"]))[1].classes) == 2
    _, val = load("csv", make_csv(tmp_path, ["cat", "catfish", "dog"]))
    assert not any(note.startswith("warning") for note in val.notes)


def test_labels_that_count_from_one_are_as_many_classes(tmp_path):
    config = settings("csv", make_csv(tmp_path, ["1", "2", "3"]))
    train, val = open_sets(config)
    for part in (train, val):
        assert part.classes == ["1", "2", "3"]
        assert all(name == str(shade % 3 + 1) for shade, name in names_by_shade(part).items())
    assert [note for note in val.notes if "from 1 to 3" in note and not note.startswith("warning")]
    # A run that began with class 0, and a number of classes that is set, keep the numbers in the file.
    saved = SavedData(["0", "1", "2", "3"], val.split)
    for other in (config, settings("csv", tmp_path / "all.csv", evaluate=True)):
        _, kept = open_sets(other, saved=saved)
        assert kept.classes == saved.classes and names_by_shade(kept) == names_by_shade(val)
        _, resumed = open_sets(other, saved=SavedData(val.classes, val.split))
        assert resumed.classes == val.classes and names_by_shade(resumed) == names_by_shade(val)
    set_by_user = replaced(config, MODEL={"NUM_CLASSES": 4})
    assert open_sets(set_by_user)[1].classes == ["0", "1", "2", "3"]


def test_other_gaps_between_numbers_cause_a_warning_with_the_classes(tmp_path):
    _, val = load("csv", make_csv(tmp_path, ["0", "2", "5"]))
    assert val.classes == [str(number) for number in range(6)]
    (warning,) = [note for note in val.notes if note.startswith("warning") and "5" in note]
    assert_names(warning, "3", "1", "4")
    _, val = load("csv", make_csv(tmp_path, ["0", "1", "2"]))
    assert not any(note.startswith("warning") for note in val.notes)
