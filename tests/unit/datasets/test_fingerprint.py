"""The metadata that identifies images and labels, independent of format and location."""

import shutil

from datasets.fingerprint import data_facts, validation_facts
from datasets.types import SavedData
from tests.support.image_sets import load, make_folders, make_list, noise, settings, shades
from tests.support.opened import open_sets
from utils.changed_facts import changed_facts


def facts_of_csv(root) -> dict:
    return data_facts(*load("csv", root / "a.csv"))


def test_each_data_change_alters_the_matching_part_of_fingerprint(tmp_path):
    make_list(tmp_path, 30)
    text, before = (tmp_path / "a.csv").read_text(), facts_of_csv(tmp_path)
    lines = text.splitlines()
    changes = {
        "labels": text.replace("ant/07.JPEG,ant", "ant/07.JPEG,bee"),
        "names": text.replace("ant/07.JPEG,ant", "ant//07.JPEG,ant"),
        "order": "\n".join([lines[0], *lines[:0:-1], ""]),
        "number": "\n".join([*lines[:-1], ""]),
    }
    found = {}
    for what, changed in changes.items():
        (tmp_path / "a.csv").write_text(changed)
        found[what] = changed_facts(before, facts_of_csv(tmp_path)).keys()
    assert found["labels"] == {"labels of the training images"}
    assert {"names of the training images", "names of the validation images"} <= found["names"] & found["order"]
    assert found["number"] & {"training images", "validation images"}


def test_renumbering_classes_keeps_the_label_fingerprint(tmp_path):
    make_folders(tmp_path / "photos", {"ant": 30, "bee": 30})
    (tmp_path / "names.txt").write_text("bee\nant\n")
    found = [
        data_facts(*load("imagefolder", tmp_path / "photos", CLASSES=each))
        for each in (None, str(tmp_path / "names.txt"))
    ]
    assert changed_facts(*found).keys() == {"classes and their order"}


def test_evaluation_scores_every_image_if_names_match_but_contents_differ(tmp_path):
    make_folders(tmp_path / "photos", {"ant": 30, "bee": 30})
    train, val = load("imagefolder", tmp_path / "photos")
    kept = SavedData(val.classes, val.split, validation_facts(val), data_facts(train, val))
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    for path, is_same in (("copy", True), ("other", False)):
        if not is_same:
            (tmp_path / "copy").rename(tmp_path / path)
            for number, file in enumerate(sorted((tmp_path / path).rglob("*.JPEG"))):
                noise(20 + number, 20).save(file, format="PNG")
        _, scored = open_sets(settings("imagefolder", tmp_path / path, evaluate=True), saved=kept)
        assert (shades(scored) == shades(val)) is is_same and len(scored) == (len(val) if is_same else 60)
