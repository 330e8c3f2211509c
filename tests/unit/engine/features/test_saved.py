"""features.npz of a run: the features of its training and validation images, with their names and targets."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.features import saved
from engine.features.compute import ImageFeatures
from engine.features.saved import FILE, features_by_name, save_features

NAMES = SimpleNamespace(table_name=lambda index: f"class/{index}.png")
PART = ImageFeatures(np.array([1, 4]), [np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)], np.array([0, 1]))


@pytest.fixture
def session(tmp_path):
    logged = []
    return SimpleNamespace(
        path=tmp_path,
        check_folder=lambda: None,
        logged=logged,
        log=SimpleNamespace(note=logged.append, warn=logged.append),
    )


def test_features_are_found_by_the_name_of_the_image(session):
    said = []
    assert features_by_name(session.path, ["class/1.png"], said.append) is None and not said
    val = PART._replace(indices=np.array([7, 2]), features=[2 * each for each in PART.features])
    save_features(session, (NAMES, NAMES), (PART, val))
    found = features_by_name(session.path, ["class/2.png", "class/new.png", "class/4.png"], said.append)
    assert found[[0, 2]].tolist() == [[2, 2, 2, 0, 0], [1, 1, 1, 0, 0]] and np.isnan(found[1]).all()
    assert len(said) == 1 and "class/new.png" in said[0]


def test_features_above_the_limit_are_not_written(session, monkeypatch):
    monkeypatch.setattr(saved, "MOST_BYTES", 2 * PART.features[0].nbytes)
    save_features(session, (NAMES, NAMES), (PART, PART))
    assert not (session.path / FILE).exists()
    assert len(session.logged) == 1


def test_unwritable_features_only_cause_a_warning(session):
    (session.path / FILE).mkdir()
    save_features(session, (NAMES, NAMES), (PART, PART))
    assert FILE in session.logged[0]


@pytest.mark.parametrize("damage", ["empty", "cut", "objects", "a column is missing", "another width", "one number"])
def test_damaged_features_are_named_and_not_used(session, damage):
    path, said = session.path / FILE, []
    save_features(session, (NAMES, NAMES), (PART, PART))
    columns = dict(np.load(path))
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "objects":  # reading a pickle could execute code
        np.savez(path, **dict.fromkeys(columns, np.array([{}], object)))
    elif damage == "a column is missing":
        np.savez(path, training_indices=np.arange(2))
    else:
        changed = np.ones((2, 4), np.float32) if damage == "another width" else np.float32(1)
        np.savez(path, **columns | {"validation_features": changed})
    assert features_by_name(session.path, ["class/1.png"], said.append) is None
    assert len(said) == 1 and str(path) in said[0]
