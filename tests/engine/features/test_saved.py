"""features.npz of a run: the features of its training and validation images, with their names and targets."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.features import saved
from engine.features.compute import ImageFeatures
from engine.features.saved import FILE, read_features, save_features
from utils.errors import ConfigError

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


def test_features_of_both_parts_are_read_as_written(session):
    assert read_features(session.path) == []
    save_features(session, (NAMES, NAMES), (PART, PART._replace(targets=np.array([1, 1]))))
    train, val = read_features(session.path)
    assert train.indices.tolist() == [1, 4] and train.names.tolist() == ["class/1.png", "class/4.png"]
    assert train.features.tolist() == [[1, 1, 1, 0, 0]] * 2
    assert (train.targets.tolist(), val.targets.tolist()) == ([0, 1], [1, 1])


def test_features_above_the_limit_are_not_written(session, monkeypatch):
    monkeypatch.setattr(saved, "MOST_BYTES", 2 * PART.features[0].nbytes)
    save_features(session, (NAMES, NAMES), (PART, PART))
    assert not (session.path / FILE).exists()
    assert len(session.logged) == 1


def test_unwritable_features_only_cause_a_warning(session):
    (session.path / FILE).mkdir()
    save_features(session, (NAMES, NAMES), (PART, PART))
    assert FILE in session.logged[0]


@pytest.mark.parametrize("damage", ["cut", "objects", "a column is missing"])
def test_damaged_features_are_refused(session, damage):
    path = session.path / FILE
    save_features(session, (NAMES, NAMES), (PART, PART))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "objects":  # reading a pickle could execute code
        np.savez(path, **dict.fromkeys(np.load(path).files, np.array([{}], object)))
    else:
        np.savez(path, training_indices=np.arange(2))
    with pytest.raises(ConfigError, match=FILE):
        read_features(session.path)
