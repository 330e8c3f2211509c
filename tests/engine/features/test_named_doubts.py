"""The first lines of a fine-tuning run name the number of labels that are probably wrong."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.features import start
from engine.features.compute import ImageFeatures

NUM_CLASSES, NUM_WRONG = 4, 20


def logged(num_wrong: int, **changes) -> list[str]:
    random = np.random.default_rng(0)
    targets = np.arange(400) % NUM_CLASSES
    features = 0.5 * random.normal(size=(NUM_CLASSES, 64))[targets] + random.normal(size=(400, 64))
    targets[:num_wrong] = (targets[:num_wrong] + 1) % NUM_CLASSES
    lines = []
    session = SimpleNamespace(path=Path("runs/one"), log=SimpleNamespace(say=lines.append))
    found = ImageFeatures(np.arange(400), [features[:, :40], features[:, 40:]], targets)
    start.name_doubts(session, found._replace(**changes), NUM_CLASSES)
    return lines


def test_wrong_labels_are_counted_and_the_command_that_shows_them_is_named():
    (line,) = logged(NUM_WRONG)
    assert int(line.split()[1]) == pytest.approx(NUM_WRONG, abs=4)
    assert line.endswith("scripts/labels.py runs/one")


def test_nothing_is_said_about_right_labels_several_labels_or_too_many_images(monkeypatch):
    assert logged(0) == []
    assert logged(NUM_WRONG, targets=np.zeros((400, NUM_CLASSES))) == []
    monkeypatch.setattr(start, "MOST_JUDGED", 400 * NUM_CLASSES - 1)
    assert logged(NUM_WRONG) == []
