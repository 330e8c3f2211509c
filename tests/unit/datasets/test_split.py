"""Images held out for validation, and the split, classes and class order in a checkpoint."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedGroupKFold

from configs.schema import Fold
from datasets import SavedData, validation_facts
from datasets.image_set import ImageSet
from datasets.index import Texts
from datasets.pixels import Pixels
from datasets.split import new_record, write_split
from datasets.split.by_hash import warn_of_other_folders
from tests.support.cases import names_of
from tests.support.configs import replaced
from tests.support.image_sets import (
    divided_by,
    draw,
    error_of,
    files_with,
    keys_of,
    load,
    make_folders,
    make_list,
    make_set,
    settings,
    shades,
)
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from tests.support.runs import run_folder, typed
from utils.errors import ConfigError, DataError

RULES = Pixels(3)


def test_classes_sharing_file_names_keep_their_validation_share():
    classes, found = ["ant", "bee", "cat", "other", "rare"], []
    names = [f"{name}/{number}.jpg" for name in classes[:3] for number in range(2000)]
    names += [f"{name}/x{number}.jpg" for name in classes[3:] for number in range(2)]
    for order in (names, names[::-1], np.random.default_rng(0).permutation(names).tolist()):
        images = files_with("/", order, [classes.index(each.partition("/")[0]) for each in order], classes, RULES)
        train, val = divided_by(images, new_record("hash", "here", 0.1, None))
        found.append(sorted(keys(val)))
        shares = val.count_classes() / (train.count_classes() + val.count_classes())
        assert shares[:3] == pytest.approx(0.1, abs=0.02) and shares[3:].tolist() == [0.5, 0.5]
    assert found[0] == found[1] == found[2]


@pytest.fixture
def relabelled(tmp_path) -> tuple[Path, str]:
    """Return a CSV file of ants, bees and cats, and its text with all bees relabelled as ants, in the same folder."""
    names = [f"{name}/{name}{number}.png" for name in ("ant", "bee", "cat") for number in range(60)]
    for name in names:
        draw(tmp_path / name)
    file = tmp_path / "a.csv"
    file.write_text("image_path,target\n" + "".join(f"{name},{name[:3]}\n" for name in names))
    return file, file.read_text().replace(",bee", ",ant")


@pytest.mark.slow
def test_relabelled_list_keeps_the_split_in_evaluation(relabelled):
    file, changed = relabelled
    train, val = load("csv", file)
    kept, before = (
        SavedData(val.classes, val.split, validation_facts(val)),
        {*keys_of(val)},
    )
    file.write_text(changed)
    _, scored = open_sets(settings("csv", file, evaluate=True), saved=kept)
    assert {*keys_of(scored)} == before
    _, anew = load("csv", file)
    others = {*keys_of(anew)} - before
    (warning,) = warn_of_other_folders(anew, kept.classes, kept.split, "weights")
    assert_names(warning, f"{len(others)} of {len(anew)}", "bee")


@pytest.mark.long
def test_renamed_class_keeps_the_split_in_every_resume(relabelled):
    file, _ = relabelled
    _, val = load("csv", file)
    before = {*keys_of(val)}
    for name in ("fox", "gnu"):
        kept = SavedData(val.classes, val.split, validation_facts(val))
        file.write_text(re.sub(r",(cat|fox)\n", f",{name}\n", file.read_text()))
        config = replaced(settings("csv", file), RESUME={"ALLOW_CHANGED": ("CLASS_NAMES",)})
        for _ in range(2):
            _, val = open_sets(config, saved=kept)
            assert {*keys_of(val)} == before
            kept = SavedData(val.classes, val.split, validation_facts(val))


@pytest.mark.long
@pytest.mark.usefixtures("signal_handlers")
def test_finetuning_warns_if_relabelled_validation_images_were_trained_on(tmp_path, small_yaml, relabelled):
    file, changed = relabelled
    flags = ["-cfg", small_yaml, "-dataset", "csv", "-data_path", file, "-epochs", "1"]
    typed("main_single_gpu.py", *flags, "-output", tmp_path / "output").done()
    weights = ["-pretrained", run_folder(tmp_path / "output") / "best.pth", "-output", tmp_path / "new"]
    assert "was trained on" not in typed("main_single_gpu.py", *flags, *weights).done().stdout
    file.write_text(changed)
    said = typed("main_single_gpu.py", *flags, *weights).done().stdout
    assert_names(next(line for line in said.splitlines() if "was trained on" in line), "warning", "bee", "split.csv")


def test_classes_without_validation_images_are_named(tmp_path):
    make_folders(tmp_path, {"ant": 2, "bee": 2, "cat": 1, "dog": 9})
    for fraction in (1e-6, 0.9):
        train, val = load("imagefolder", tmp_path, VAL_FRACTION=fraction)
        assert train.count_classes()[:3].tolist() == [1, 1, 1] and train.count_classes()[3]
        assert val.count_classes()[:3].tolist() == [1, 1, 0] and val.count_classes()[3]
        assert_names("\n".join(val.notes), *names_of("splits", f"a fraction of {fraction}"))


def test_data_with_one_image_per_class_is_refused(tmp_path):
    make_folders(tmp_path / "photos", {"ant": 1, "bee": 1, "cat": 1})
    found = error_of("imagefolder", tmp_path / "photos")
    assert_names(found, "DATA.DATA_PATH", tmp_path / "photos", "two", "docs/data.md")
    make_folders(tmp_path / "photos", {"ant": 2})
    assert len(load("imagefolder", tmp_path / "photos")[1]) == 1
    make_folders(tmp_path / "parts/train", {"ant": 1, "bee": 1})
    make_folders(tmp_path / "parts/val", {"ant": 1})
    assert len(load("imagefolder", tmp_path / "parts")[1]) == 1


def test_position_split_leaves_a_training_image_per_class():
    targets = np.repeat(np.arange(5), [1, 2, 3, 10, 40])
    images = files_with("/", [f"{number}.png" for number in range(56)], targets, list("abcde"), RULES)
    for fraction, held_out in ((0.9, [0, 1, 2, 9, 36]), (0.1, [0, 1, 1, 1, 4]), (0, [0] * 5)):
        _, val = divided_by(images, new_record("position", "here", fraction, None))
        assert val.count_classes().tolist() == held_out


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"VAL_FRACTION": 0.3}, {"FOLD": "2/4"}, {"GROUP_BY": "day", "VAL_FRACTION": 0.4}])
def test_evaluation_of_copied_data_scores_the_held_out_images(tmp_path, given):
    make_list(tmp_path / "here", 20)
    dataset, file, group = ("csv", "a.csv", {"GROUP_BY": "day"}) if "GROUP_BY" in given else ("imagefolder", "", {})
    _, val = load(dataset, tmp_path / "here" / file, **given)
    kept = SavedData(val.classes, val.split, validation_facts(val))
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    for place, others in (("here", {}), ("copy", {"FOLD": "0/3"})):  # the original VAL_FRACTION and FOLD count
        scoring = settings(dataset, tmp_path / place / file, evaluate=True, **group, **others)
        train, scored = open_sets(scoring, saved=kept)
        assert train is None and shades(scored) == shades(val) and scored.split["rule"] == val.split["rule"]
    for number in range(20):  # a new split would hold out some of them
        draw(tmp_path / "copy" / "ant" / f"new-{number}.png")
    _, scored = open_sets(settings("imagefolder", tmp_path / "copy", evaluate=True), saved=kept)
    assert len(scored) == 60
    assert_names("\n".join(scored.notes), "warning", "DATA.DATA_PATH", "40 of 60", tmp_path / "here")
    assert not any("trained on" in note for note in load("imagefolder", tmp_path / "copy", evaluate=True)[1].notes)


def warnings_of_evaluation(dataset: str, path: Path, saved: SavedData) -> list[str]:
    _, scored = open_sets(settings(dataset, path, evaluate=True), saved=saved)
    return [note for note in scored.notes if note.startswith("warning") and "trained on" in note]


def test_evaluation_warns_only_of_images_found_in_the_training_folder(tmp_path):
    for shade, part in ((0, "train"), (100, "val"), (200, "test")):
        make_folders(tmp_path / part, {"ant": 5, "bee": 5}, shade)
    _, val = load("imagefolder", tmp_path)
    kept = SavedData(val.classes, val.split, validation_facts(val))
    assert warnings_of_evaluation("imagefolder", tmp_path / "test", kept) == []  # with the file names of train/
    assert_names(*warnings_of_evaluation("imagefolder", tmp_path / "train", kept), "DATA.DATA_PATH", tmp_path / "train")
    shutil.copy(tmp_path / "train/bee/03.JPEG", tmp_path / "test/bee")
    (found,) = warnings_of_evaluation("imagefolder", tmp_path / "test", kept)
    assert_names(found, "1 of 10", tmp_path / "test/bee/03.JPEG", tmp_path / "train")
    shutil.rmtree(tmp_path / "train")
    assert warnings_of_evaluation("imagefolder", tmp_path / "test", kept) == []


def test_evaluation_of_another_list_in_the_same_folder_gets_no_warning(tmp_path):
    make_folders(tmp_path, {"ant": 6, "bee": 6})
    for part, numbers in (("train", range(3)), ("val", range(3, 4)), ("test", range(4, 6))):
        rows = [f"{name}/{number:02d}.JPEG,{name}" for name in ("ant", "bee") for number in numbers]
        (tmp_path / f"{part}.csv").write_text("\n".join(["image_path,target", *rows, ""]))
    _, val = load("csv", tmp_path)
    kept = SavedData(val.classes, val.split, validation_facts(val))
    assert warnings_of_evaluation("csv", tmp_path / "test.csv", kept) == []
    assert_names(*warnings_of_evaluation("csv", tmp_path / "train.csv", kept), "DATA.DATA_PATH", tmp_path / "train.csv")


def test_numeric_labels_keep_numbers_and_take_checkpoint_class_names(tmp_path):
    make_set(tmp_path)
    train, val = open_sets(settings("shards", tmp_path), saved=SavedData(["c", "7", "a", "d"], {}))
    assert train.targets.tolist() == [number % 3 for number in range(30)] and val.classes == ["c", "7", "a", "d"]
    assert [note for note in val.notes if "0 is c" in note and "2 is a" in note]
    train, val = open_sets(settings("shards", tmp_path), saved=SavedData(["1", "2", "0"], {}))
    assert not [note for note in val.notes if " is " in note]
    assert [train.classes[n] for n in train.targets] == [f"{number % 3}" for number in range(30)]
    with refused(DataError, "DATA.DATA_PATH", "2"):
        open_sets(settings("shards", tmp_path), saved=SavedData(["c", "b"], {}))


def test_groups_equal_to_classes_cannot_be_split(tmp_path):
    with refused(DataError, "DATA.GROUP_BY", "target", "validation"):
        load("csv", make_list(tmp_path, 5), GROUP_BY="target")


def test_share_that_whole_groups_hold_out_is_named_if_it_differs(tmp_path):
    _, val = load("csv", make_list(tmp_path, 20, num_days=4), GROUP_BY="day", VAL_FRACTION=0.1)
    (note,) = [note for note in val.notes if "whole group" in note]
    assert_names(note, "DATA.VAL_FRACTION 0.1", f"{len(val) / 40:.1%}", f"{len(val) // 10} whole group", "day")
    _, val = load("csv", tmp_path / "a.csv", GROUP_BY="day", VAL_FRACTION=len(val) / 40)
    assert not any("whole group" in note for note in val.notes)


@pytest.mark.slow
def test_note_about_whole_groups_names_the_fraction_that_comes_nearest():
    # All images of class 2 are in group 0, so the class decides the part of this group.
    labels = [number // 30 if number % 6 else 2 for number in range(60)]
    groups = [number % 6 for number in range(60)]
    images = images_of(labels, [f"{number:02d}.png" for number in range(60)], groups)

    def held_out(fraction: float) -> tuple[float, str]:
        _, val = divided_by(images, new_record("hash", "here", fraction, None) | {"group_by": "day"})
        return len(val) / 60, "".join(note for note in val.notes if "whole group" in note)

    found = {fraction: held_out(fraction) for fraction in (np.arange(1, 91) / 100).tolist()}
    distances, named = [], 0
    for fraction, (share, note) in found.items():
        if other := re.search(r"DATA\.VAL_FRACTION=([0-9.]+) would hold out (.*)%", note):
            share, named = held_out(float(other[1]))[0], named + 1
            assert other[2] == f"{share:.1%}".removesuffix("%")
        if note:  # no fraction is nearer than the one that the note names, or than this one
            nearest = min(abs(each - fraction) for each, _ in found.values())
            distances.append(abs(share - fraction) - nearest)
    assert named and distances == pytest.approx([0] * len(distances))


# --- cross-validation ---


def keys(image_set) -> list[str | int]:
    """Return the identity of each image: its name, or its row for digits, because both parts have an image 0."""
    known_by = image_set.row if image_set.storage.in_memory else image_set.key
    return [known_by(index) for index in range(len(image_set))]


FEW = {"equal": [20] * 8, "small": [5] * 3, "rare": [3, 400], "uneven": [1, 2, 7, 11, 13]}


def images_of(labels: list[int], names: list[str], groups: list[int] | None = None) -> ImageSet:
    """Return images of these classes without files. `names`: below the folders of their classes."""
    classes = [f"class {number}" for number in range(max(labels) + 1)]
    paths = [f"{classes[label]}/{name}" for label, name in zip(labels, names, strict=True)]
    images = files_with("/", paths, labels, classes, RULES)
    return replace(images, groups=groups and Texts.of([b"%d" % group for group in groups]))


def counts_of_folds(images: ImageSet, total: int, **record) -> np.ndarray:
    """Return int [total, classes]: the number of held-out images of each class. Each image is held out once."""
    held_out = [divided_by(images, new_record("hash", "here", 0.1, Fold(n, total)) | record)[1] for n in range(total)]
    rows = np.concatenate([part.rows for part in held_out])
    assert sorted(rows.tolist()) == [*range(len(images))]
    return np.array([part.count_classes() for part in held_out])


@pytest.mark.parametrize("counts", FEW.values(), ids=FEW)
@pytest.mark.parametrize("are_repeated", [False, True])
def test_folds_have_equal_shares_of_each_class(counts, are_repeated):
    labels = np.repeat(np.arange(len(counts)), counts).tolist()
    places = [labels[:row].count(label) for row, label in enumerate(labels)] if are_repeated else range(len(labels))
    found = counts_of_folds(images_of(labels, [f"{place}.png" for place in places]), 5)
    assert (np.ptp(found, axis=0) <= 1).all() and np.ptp(found.sum(axis=1)) <= 1


def test_folds_of_class_folders_and_digits_are_their_images_in_equal_parts(tmp_path):
    for name in ("ant", "bee", "cat"):
        for number in range(7):
            draw(tmp_path / name / f"{number}.png")
    for dataset, size in (("imagefolder", 21), ("digits", 450)):
        held_out = [load(dataset, tmp_path, FOLD=f"{n}/5")[1] for n in range(5)]
        assert sorted(row for part in held_out for row in part.rows) == [*range(size)]
        found = np.array([part.count_classes() for part in held_out])
        assert (np.ptp(found, axis=0) <= 1).all() and np.ptp(found.sum(axis=1)) <= 1


@pytest.mark.long
def test_folds_of_groups_are_as_even_as_those_of_scikit_learn():
    total, found = 5, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        groups, shares = np.repeat(np.arange(60), rng.integers(1, 16, 60)), rng.dirichlet([1, 2, 4, 8], 60)
        labels = np.array([rng.choice(4, p=shares[group]) for group in groups])
        images = images_of(labels.tolist(), [f"{row}.png" for row in range(len(labels))], groups.tolist())
        ours = counts_of_folds(images, total, group_by="person")
        train, val = divided_by(images, new_record("hash", "here", 0, Fold(0, total)) | {"group_by": "person"})
        assert (ours > 0).all() and not {*groups[train.rows]} & {*groups[val.rows]}
        divided = StratifiedGroupKFold(total).split(labels, labels, groups)
        theirs = np.array([np.bincount(labels[held_out], minlength=4) for _, held_out in divided])
        found.append([(counts / counts.sum(axis=0)).std(axis=0).mean() for counts in (ours, theirs)])
    ours, theirs = np.mean(found, axis=0)
    assert ours <= theirs, (ours, theirs)


def test_folds_do_not_count_groups_that_have_left_them():
    """Groups are placed twice. If one still counted in its first fold, the folds would have 6 images and 1."""
    labels, groups = [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 2, 2, 2]
    counts = counts_of_folds(images_of(labels, [f"{row}.png" for row in range(7)], groups), 2, group_by="person")
    assert sorted(counts.sum(axis=1)) == [3, 4]


def test_folds_share_each_label_of_images_with_several(tmp_path):
    rng, names = np.random.default_rng(0), ["ant", "bee", "cat", "dog"]
    has_label = rng.random((60, 4)) < [0.7, 0.4, 0.2, 0.1]
    labels = ["|".join(name for name, has in zip(names, row, strict=True) if has) for row in has_label]
    for number in range(60):
        draw(tmp_path / f"{number}.png")
    rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
    (tmp_path / "a.csv").write_text("\n".join(["image_path,target", *rows, ""]))
    config = replaced(settings("csv", tmp_path / "a.csv", LABEL_SEPARATOR="|"), TRAIN={"LOSS": "bce"})
    parts = [open_sets(replaced(config, DATA={"FOLD": f"{number}/5"}))[1] for number in range(5)]
    assert sorted(key for part in parts for key in keys_of(part)) == sorted(f"{number}.png" for number in range(60))
    assert (np.ptp([part.count_classes() for part in parts], axis=0) <= 2).all()


def saved_in(folder: Path, train: ImageSet, val: ImageSet) -> SavedData:
    """Write the split.csv of a run, and return what its checkpoint in this folder says about its images."""
    folder.mkdir(exist_ok=True)
    write_split(folder / "split.csv", train, val)
    return SavedData(val.classes, val.split, validation_facts(val), file=folder / "last.pth")


def test_resumed_and_evaluated_runs_keep_the_folds_when_photos_are_added(tmp_path):
    photos, before, after = tmp_path / "photos", {}, {}
    make_folders(photos, {"ant": 11, "bee": 7, "cat": 5})
    parts = {number: load("imagefolder", photos, FOLD=f"{number}/5") for number in range(5)}
    kept = {number: saved_in(tmp_path / f"{number}", *pair) for number, pair in parts.items()}
    make_folders(photos, {"ant": 18, "bee": 8, "dog": 5})
    changed = {"ALLOW_CHANGED": ("CLASS_NAMES",)}
    for number, (_, val) in parts.items():
        before |= dict.fromkeys(keys_of(val), number)
        config = replaced(settings("imagefolder", photos, FOLD=f"{number}/5"), RESUME=changed)
        (photos / "dog").rename(tmp_path / "dog")  # a resumed run has no new classes
        _, resumed = open_sets(config, saved=kept[number])
        (tmp_path / "dog").rename(photos / "dog")
        after |= dict.fromkeys(keys_of(resumed), number)
        scored = open_sets(settings("imagefolder", photos, evaluate=True), saved=kept[number])[1]
        assert {*keys_of(scored)} == {*keys_of(resumed)}
    assert before.items() <= after.items() and len(after) == 18 + 8 + 5
    for name in ("ant", "bee", "cat"):
        sizes = Counter(number for key, number in after.items() if key.startswith(name))
        assert max(sizes.values()) - min(sizes.values()) <= 1, sizes


def test_photo_that_moved_to_another_class_keeps_its_fold(tmp_path):
    photos = tmp_path / "photos"
    for number in range(24):
        draw(photos / ("ant" if number < 12 else "bee") / f"{number}.png")
    parts = load("imagefolder", photos, FOLD="1/3")
    kept = saved_in(tmp_path / "run", *parts)
    moved = [[key for key in keys_of(part) if key.startswith("ant")][:2] for part in parts]
    for key in sum(moved, []):
        (photos / key).rename(photos / key.replace("ant", "bee"))
    found = open_sets(settings("imagefolder", photos, FOLD="1/3"), saved=kept)
    for part, before, names in zip(found, parts, moved, strict=True):
        wanted = {key.replace("ant", "bee") if key in names else key for key in keys_of(before)}
        assert {*keys_of(part)} == wanted


def test_evaluation_warns_if_photos_changed_and_the_list_of_folds_is_gone(tmp_path):
    photos = tmp_path / "photos"
    make_folders(photos, {"ant": 11, "bee": 7})
    kept = saved_in(tmp_path / "run", *load("imagefolder", photos, FOLD="1/3"))
    (tmp_path / "run/split.csv").unlink()
    for count in (0, 9):
        make_folders(photos, {"bee": 7 + count})
        scored = open_sets(settings("imagefolder", photos, evaluate=True), saved=kept)[1]
        found = [note for note in scored.notes if "split.csv" in note]
        assert bool(found) == bool(count) and all("DATA.FOLD" in note for note in found)


def test_class_missing_from_a_training_fold_is_named(tmp_path):
    make_folders(tmp_path, {"ant": 30, "bee": 30, "rare": 1})
    for fold in ("0/2", "1/2"):
        assert_names("\n".join(load("imagefolder", tmp_path, FOLD=fold)[1].notes), *names_of("splits", f"fold {fold}"))


def test_folds_are_refused_for_already_divided_data(tmp_path):
    make_folders(tmp_path / "train", {"ant": 20, "bee": 20})
    make_folders(tmp_path / "val", {"ant": 2, "bee": 2})
    with refused(DataError, "DATA.FOLD", "50"):
        load("imagefolder", tmp_path / "val", FOLD="4/50")
    with refused(ConfigError, "DATA.FOLD", tmp_path / "val", "-data_path"):
        load("imagefolder", tmp_path, FOLD="0/5")
    assert len(load("imagefolder", tmp_path / "train", FOLD="0/5")[1]) < 40
    assert len(load("imagefolder", tmp_path, FOLD="0/5", evaluate=True)[1]) == 4
    make_set(tmp_path / "shards")
    for dataset, path in {"shards": "shards", "imagenet2012": "", "synthetic": ""}.items():
        with refused(ConfigError, "DATA.FOLD", dataset):
            load(dataset, tmp_path / path, FOLD="0/5", SYNTHETIC_SIZE=20)


def test_unused_validation_fraction_is_reported(tmp_path):
    make_folders(tmp_path / "train", {"ant": 20, "bee": 20})
    make_folders(tmp_path / "val", {"ant": 2, "bee": 2})
    for dataset, path, fraction, is_told in (
        ("imagefolder", "", 0.3, True),
        ("imagefolder", "", 0.1, False),  # the default fraction
        ("imagefolder", "train", 0.3, False),
        ("digits", "", 0.3, True),
        ("digits", "", 0.2, False),
    ):
        notes = load(dataset, tmp_path / path, VAL_FRACTION=fraction)[1].notes
        assert any(note.startswith("warning") and "DATA.VAL_FRACTION 0.3" in note for note in notes) is is_told
