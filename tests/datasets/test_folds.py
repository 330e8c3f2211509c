"""Cross-validation: DATA.FOLD."""

import itertools

import numpy as np
import pytest

from configs.load import load as load_settings
from datasets import SavedData, identity, load_image_sets
from tests.support.image_sets import draw, load, make_folders, make_set, samples, settings, write_tar
from tests.support.parquet_files import rows, write_parquet
from tests.support.refusals import refused
from utils.errors import ConfigError, DataError


def make(dataset: str, root) -> tuple:
    """A set of this kind without a validation part: its path, and further settings."""
    if dataset == "csv":
        lines = [f"{number}.png,{'ab'[number % 2]},p{number // 3}" for number in range(40)]
        for number in range(40):
            draw(root / f"{number}.png", number)
        (root / "a.csv").write_text("\n".join(["image_path,target,person", *lines, ""]))
        return root / "a.csv", {"GROUP_BY": "person"}
    if dataset == "imagefolder":
        make_folders(root, {"ant": 20, "bee": 30})
    elif dataset == "shards":
        for number in range(2):
            write_tar(root / f"train-{number}.tar", samples(30 * number, 30))
    elif dataset == "parquet":
        write_parquet(root / "train.parquet", rows(range(50)))
    elif dataset == "caltech101":
        make_folders(root / "101_ObjectCategories", {"ant": 13, "bee": 21, "cat": 1})
    return root, {}


def keys(image_set) -> list[str | int]:
    """What each image is known by: its name, of digits its row, since both parts have an image 0."""
    known_by = image_set.row if image_set.in_memory else image_set.key
    return [known_by(index) for index in range(len(image_set))]


@pytest.mark.parametrize("dataset", ["imagefolder", "csv", "shards", "parquet", "caltech101", "digits"])
def test_each_image_is_held_out_in_exactly_one_fold_and_trained_on_in_the_others(tmp_path, dataset):
    total = 3
    path, options = make(dataset, tmp_path)
    sets = [load(dataset, path, FOLD=f"{fold}/{total}", **options) for fold in range(total)]
    everything = sorted(keys(sets[0][0]) + keys(sets[0][1]))
    assert len(everything) == len(set(everything)) > 10
    assert sorted(itertools.chain(*(keys(val) for _, val in sets))) == everything
    for train, val in sets:
        assert sorted(keys(train) + keys(val)) == everything
    if dataset == "csv":
        held_out = [{int(key.removesuffix(".png")) // 3 for key in keys(val)} for _, val in sets]
        assert sum(map(len, held_out)) == len(set.union(*held_out)) == 14, "a group lies in one fold"


@pytest.mark.parametrize("dataset", ["imagefolder", "digits"])
def test_fold_0_is_what_the_same_fraction_holds_out(tmp_path, dataset):
    path, _ = make(dataset, tmp_path)
    train, val = load(dataset, path, VAL_FRACTION=0.2)
    fold = load(dataset, path, FOLD="0/5")
    assert [keys(part) for part in fold] == [keys(train), keys(val)] and val.split != fold[1].split


def test_folds_of_digits_have_the_same_share_of_each_class():
    counts = [load("digits", FOLD=f"{fold}/10")[1].count_classes() for fold in range(10)]
    assert np.ptp(counts, axis=0).max() <= 1


def test_a_class_that_a_fold_cannot_be_trained_on_is_named(tmp_path):
    make_folders(tmp_path, {"ant": 30, "bee": 30, "rare": 1})
    notes = [load("imagefolder", tmp_path, FOLD=f"{fold}/2")[1].notes for fold in range(2)]
    found = [note for each in notes for note in each if "warning" in note and "rare" in note]
    assert len(found) == 2 and sum("training images" in note for note in found) == 1


def test_data_with_validation_images_of_its_own_is_refused_and_one_part_of_it_is_divided(tmp_path):
    make_folders(tmp_path / "train", {"ant": 20, "bee": 20})
    make_folders(tmp_path / "val", {"ant": 2, "bee": 2})
    with refused(DataError, "DATA.FOLD", "50"):
        load("imagefolder", tmp_path / "val", FOLD="3/50")
    with refused(ConfigError, "DATA.FOLD", tmp_path / "val", "-data_path"):
        load("imagefolder", tmp_path, FOLD="0/5")
    assert len(load("imagefolder", tmp_path / "train", FOLD="0/5")[1]) < 40
    assert len(load("imagefolder", tmp_path, FOLD="0/5", evaluate=True)[1]) == 4
    make_set(tmp_path / "shards")
    for dataset, path in {"shards": "shards", "imagenet2012": "", "synthetic": "", "fractals": ""}.items():
        with refused(ConfigError, "DATA.FOLD", dataset):
            load(dataset, tmp_path / path, FOLD="0/5", SYNTHETIC_SIZE=20)


@pytest.mark.parametrize(
    "words, names",
    [
        (["DATA.FOLD=5/5"], ["DATA.FOLD", "5/5"]),
        (["DATA.FOLDS=5", "DATA.FOLD=5"], ["DATA.FOLD", "5/5"]),
        (["DATA.FOLD=1"], ["DATA.FOLD", "0/5"]),
        (["DATA.FOLD=0/1"], ["DATA.FOLD", "2"]),
    ],
)
def test_a_fold_that_there_is_not_is_refused(small_yaml, words, names):
    with refused(ConfigError, *names):
        load_settings(["-cfg", str(small_yaml), "-opts", *words])


def test_evaluation_of_another_part_of_a_set_that_is_always_divided_is_warned_of():
    _, val = load("digits", FOLD="3/5")
    kept = SavedData(val.classes, val.split, identity(val))
    for fold, is_warned in ((3, False), (0, True)):
        _, scored = load_image_sets(settings("digits", evaluate=True, FOLD=f"{fold}/5"), saved=kept)
        assert any("trained on" in note for note in scored.notes) is is_warned
