"""Copies of a photo stay in one part of a drawn split and in one fold."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import SavedData, validation_facts
from datasets.split import write_split
from datasets.split.trained_on import holds_out_no_more
from tests.support.image_sets import draw_patches, keys_of, load, settings
from tests.support.opened import open_sets

pytestmark = pytest.mark.slow

NUM_PHOTOS = 40  # of each class


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(("ant", "bee", "cat")):
        for photo in range(NUM_PHOTOS):
            draw_patches(root / name / f"{photo:02d}.png", seed=1000 * number + photo, size=(48, 48))
    return root


@pytest.fixture
def photos(originals, tmp_path) -> Path:
    """Return folders of different photos of three classes."""
    shutil.copytree(originals, tmp_path / "photos")
    return tmp_path / "photos"


def plant(root: Path, *names: str) -> list[tuple[str, str]]:
    """Add an equal image, and a smaller one, for each of these photos. Return pairs of names."""
    pairs = []
    for name in names:
        equal, near = name.replace(".png", " (1).png"), name.replace(".png", "_small.jpg")
        shutil.copy(root / name, root / equal)
        with Image.open(root / name) as image:
            image.resize((40, 40)).save(root / near, quality=90)
        pairs += [(name, equal), (name, near)]
    return pairs


def all_names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.*"))


def saved_by(train, val, folder: Path) -> SavedData:
    """Return the record of a run with these parts. Its folder has split.csv."""
    folder.mkdir(exist_ok=True)
    write_split(folder / "split.csv", train, val)
    return SavedData(val.classes, val.split, validation_facts(val), file=folder / "best.pth")


@pytest.mark.long
def test_copies_are_in_the_same_part_and_fold(photos):
    before = {*keys_of(load("imagefolder", photos)[1])}
    pairs = plant(photos, *(f"{name}/{photo:02d}.png" for name in ("ant", "bee") for photo in range(0, NUM_PHOTOS, 2)))
    train, val = load("imagefolder", photos)
    held_out = {*keys_of(val)}
    assert val.split["copies"] and any(name in held_out for name, _ in pairs)
    assert all((name in held_out) == (copy in held_out) for name, copy in pairs)
    assert before <= held_out  # copies with longer names move no other image
    assert sum(line.startswith("copies: 120 images look the same") for line in val.notes) == 1
    for fold in range(3):
        held_out = {*keys_of(load("imagefolder", photos, FOLD=f"{fold}/3")[1])}
        assert all((name in held_out) == (copy in held_out) for name, copy in pairs)


def test_run_on_all_photos_has_copies_in_the_same_fold(photos):
    pairs = plant(photos, *(f"ant/{photo:02d}.png" for photo in range(0, NUM_PHOTOS, 2)))
    whole, _ = load("imagefolder", photos, FOLDS=3)
    fold_of = dict(zip(keys_of(whole), whole.folds.tolist(), strict=True))
    assert all(fold_of[name] == fold_of[copy] for name, copy in pairs)
    assert whole.copies is not None and {*fold_of.values()} == {0, 1, 2}


def test_without_copies_the_split_is_the_old_one(photos, monkeypatch):
    train, val = load("imagefolder", photos)
    assert "copies" not in val.split and val.copies is None
    monkeypatch.setattr("datasets.opening.MOST_SEARCHED", 3)
    assert keys_of(load("imagefolder", photos)[1]) == keys_of(val)


def test_set_with_too_many_images_is_not_read(photos, monkeypatch):
    plant(photos, "ant/00.png")
    monkeypatch.setattr("datasets.opening.MOST_SEARCHED", 3)
    for path in photos.rglob("*.png"):
        path.write_bytes(b"not an image")
    assert "copies" not in load("imagefolder", photos)[1].split


@pytest.mark.long
def test_added_photos_move_no_copies(photos):
    plant(photos, *(f"bee/{photo:02d}.png" for photo in range(NUM_PHOTOS)))
    train, val = load("imagefolder", photos)
    for photo in range(30):
        draw_patches(photos / "cat" / f"new{photo}.png", seed=7000 + photo, size=(48, 48))
    shutil.copy(photos / "bee/01.png", photos / "bee/a later copy.png")
    later, later_val = load("imagefolder", photos)
    assert {*keys_of(train)} <= {*keys_of(later)} and {*keys_of(val)} <= {*keys_of(later_val)}


def test_copies_in_two_classes_are_in_one_part(photos):
    pairs = []
    for photo in range(20):
        shutil.copy(photos / f"ant/{photo:02d}.png", photos / f"bee/other{photo:02d}.png")
        pairs.append((f"ant/{photo:02d}.png", f"bee/other{photo:02d}.png"))
    held_out = {*keys_of(load("imagefolder", photos)[1])}
    assert all((one in held_out) == (other in held_out) for one, other in pairs)


def test_large_group_of_copies_stays_in_training(photos):
    for copy in range(NUM_PHOTOS):
        shutil.copy(photos / "ant/00.png", photos / f"ant/0{copy}c.png")
    train, val = load("imagefolder", photos)
    alike = [name for name in all_names(photos) if name.endswith("c.png")]
    assert {*alike} <= {*keys_of(train)} and val.count_classes().min() > 0


def test_class_of_copies_only_is_divided_with_a_warning(photos):
    for photo in range(1, NUM_PHOTOS):
        shutil.copy(photos / "ant/00.png", photos / f"ant/{photo:02d}.png")
    val = load("imagefolder", photos)[1]
    assert val.count_classes().min() > 0
    assert any("40 images that look the same, such as ant/00.png, are divided" in line for line in val.notes)


def test_persons_who_share_a_photo_are_in_one_part(photos):
    persons = {name: int(name[4:6]) for name in all_names(photos)}
    for number in range(4):
        shutil.copy(photos / f"ant/{number:02d}.png", photos / f"bee/{number:02d}.png")
        persons[f"bee/{number:02d}.png"] = 39 - number
    rows = [f"{name},{name[:3]},p{person}" for name, person in persons.items()]
    (photos / "a.csv").write_text("\n".join(["image_path,target,person", *rows, ""]))
    for fold in range(4):
        held_out = {*keys_of(load("csv", photos / "a.csv", GROUP_BY="person", FOLD=f"{fold}/4")[1])}
        for number in range(4):
            both = (number, 39 - number)
            assert len({name in held_out for name, person in persons.items() if person in both}) == 1


@pytest.mark.long
def test_evaluated_run_keeps_its_parts_by_its_list(photos, tmp_path):
    pairs = plant(photos, *(f"cat/{photo:02d}.png" for photo in range(NUM_PHOTOS)))
    for options in ({}, {"FOLD": "1/4"}):
        train, val = load("imagefolder", photos, **options)
        saved = saved_by(train, val, tmp_path / "run")
        scored = open_sets(settings("imagefolder", photos, evaluate=True), saved=saved)[1]
        assert keys_of(scored) == keys_of(val) and scored.is_grouped
        again = open_sets(settings("imagefolder", photos, **options), saved=saved)
        assert [keys_of(part) for part in again] == [keys_of(train), keys_of(val)]
    for photo in range(NUM_PHOTOS):  # the list counts, not the pixels
        draw_patches(photos / f"cat/{photo:02d}.png", seed=9000 + photo, size=(48, 48))
    again = open_sets(settings("imagefolder", photos, FOLD="1/4"), saved=saved)
    assert [keys_of(part) for part in again] == [keys_of(train), keys_of(val)]
    assert np.unique(again[1].copies).size < len(again[1]) and len(pairs)


@pytest.mark.long
def test_resumed_run_keeps_its_parts_when_earlier_copies_are_added(photos, tmp_path):
    plant(photos, *(f"cat/{photo:02d}.png" for photo in range(NUM_PHOTOS)))
    train, val = load("imagefolder", photos)
    saved, pairs = saved_by(train, val, tmp_path / "run"), []
    for name in ("ant", "bee"):
        for photo in range(NUM_PHOTOS):
            original, copy = f"{name}/{photo:02d}.png", f"{name}/{'!#$%&()+,-'[photo % 10]}{photo // 10}.jpg"
            shutil.copy(photos / original, photos / copy)
            pairs.append((original, copy))
    trained, held_out = ({*keys_of(part)} for part in open_sets(settings("imagefolder", photos), saved=saved))
    assert {*keys_of(train)} <= trained and {*keys_of(val)} <= held_out
    assert all((original in held_out) == (copy in held_out) for original, copy in pairs)


def test_run_with_copies_evaluates_and_continues_without_them(photos, tmp_path):
    original = tmp_path / "original"
    shutil.copytree(photos, original)
    plant(photos, *(f"cat/{photo:02d}.png" for photo in range(NUM_PHOTOS)))
    train, val = load("imagefolder", photos)
    saved = saved_by(train, val, tmp_path / "run")
    trained, held_out = ({*keys_of(part)} for part in open_sets(settings("imagefolder", original), saved=saved))
    assert trained < {*keys_of(train)} and held_out < {*keys_of(val)}
    others = tmp_path / "others"
    for photo in range(NUM_PHOTOS):
        draw_patches(others / f"cat/other{photo}.png", seed=9000 + photo, size=(48, 48))
    assert len(open_sets(settings("imagefolder", others, evaluate=True), saved=saved)[1]) == NUM_PHOTOS


@pytest.mark.long
def test_evaluation_without_the_list_finds_the_copies_again(photos):
    plant(photos, *(f"cat/{photo:02d}.png" for photo in range(NUM_PHOTOS)))
    val = load("imagefolder", photos)[1]
    saved = SavedData(val.classes, val.split, validation_facts(val))
    assert keys_of(open_sets(settings("imagefolder", photos, evaluate=True), saved=saved)[1]) == keys_of(val)


def test_run_of_an_older_version_is_divided_as_before(photos):
    plant(photos, *(f"cat/{photo:02d}.png" for photo in range(NUM_PHOTOS)))
    val = load("imagefolder", photos)[1]
    record = {key: value for key, value in val.split.items() if key != "copies"}
    again = open_sets(settings("imagefolder", photos), saved=SavedData(val.classes, record))[1]
    assert "copies" not in again.split and keys_of(again) != keys_of(val)
    assert not holds_out_no_more(record, val.split) and not holds_out_no_more(val.split, record)


def test_own_validation_folder_is_not_searched(photos, tmp_path):
    plant(photos, "ant/00.png")
    for part in ("train", "val"):
        shutil.copytree(photos, tmp_path / "data" / part)
    train, val = load("imagefolder", tmp_path / "data")
    assert train.copies is None and val.copies is None
