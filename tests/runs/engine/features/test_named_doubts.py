"""The first lines of a fine-tuning run, and -check, name the number of labels that are probably wrong."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.features import doubts
from engine.features.compute import ImageFeatures
from engine.features.doubts import describe_doubts
from engine.quick_checks import WARN
from tests.support.pages import script_of
from tests.support.runs import run_folder, typed

NUM_CLASSES, NUM_WRONG = 4, 20


def described(num_wrong: int, **changes) -> str:
    random = np.random.default_rng(0)
    labels = np.arange(400) % NUM_CLASSES
    features = 0.5 * random.normal(size=(NUM_CLASSES, 64))[labels] + random.normal(size=(400, 64))
    labels[:num_wrong] = (labels[:num_wrong] + random.integers(1, NUM_CLASSES, num_wrong)) % NUM_CLASSES
    part = ImageFeatures(np.arange(400), [features], labels)._replace(**changes)
    return describe_doubts([part], NUM_CLASSES)


def test_nothing_is_said_about_right_labels_several_labels_or_too_many_images(monkeypatch):
    assert described(0) == ""
    assert described(NUM_WRONG, targets=np.zeros((400, NUM_CLASSES))) == ""
    monkeypatch.setattr(doubts, "MOST_JUDGED", 400 * NUM_CLASSES - 1)
    assert described(NUM_WRONG) == ""


def draw_classes(folder: Path, num_classes: int = 10, count: int = 9) -> int:
    """Write noisy images, whose classes any features separate, in folders of their labels. Return how many are wrong.

    Every eighth image is labelled as another class.
    """
    random = np.random.default_rng(0)
    patterns = random.integers(0, 256, (num_classes, 8, 8))
    classes = np.repeat(np.arange(num_classes), count)
    images = np.clip(patterns[classes] + random.normal(0, 20, (len(classes), 8, 8)), 0, 255).astype(np.uint8)
    labels, wrong = classes.copy(), np.arange(0, len(classes), 8)
    labels[wrong] = (classes[wrong] + 1 + np.arange(len(wrong)) % (num_classes - 1)) % num_classes
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / f"class {label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"class {label}" / f"{number}.png")
    return len(wrong)


@pytest.mark.long
def test_check_and_first_lines_of_a_run_name_wrong_labels_and_the_command_that_lists_them(convolutions, tmp_path):
    # Random weights, because trained ones depend on the processor.
    base = ["-cfg", convolutions, "-output", tmp_path / "base", "-epochs", 1, "-opts", "TRAIN.BASE_LR=0"]
    typed("main_single_gpu.py", *base).done()
    weights, photos = run_folder(tmp_path / "base") / "best.pth", tmp_path / "photos"
    num_wrong = draw_classes(photos)
    words = ["-cfg", convolutions, "-pretrained", weights, "-dataset", "imagefolder", "-data_path", photos]
    words += ["-output", tmp_path / "runs", "-epochs", 1, "-opts", "MODEL.NEW_CLASSIFIER=zeros"]
    checked = typed("main_single_gpu.py", "-check", *words).done().stdout
    trained = typed("main_single_gpu.py", *words).done().stdout
    (row,) = [line for line in checked.splitlines() if line.startswith("labels ")]
    (line,) = [line for line in trained.splitlines() if line.startswith("labels: about")]
    (command,) = [line for line in checked.splitlines() if "list them: " in line]
    assert row.split()[1] == WARN and re.search(r"about \d+ of ([\d,]+) labels", row)[0] in line
    assert line.endswith(f"halfstep labels {run_folder(tmp_path / 'runs')}")
    written = ("-output", tmp_path / "labels", "-no_copies")
    script, words = script_of(shlex.split(command.partition("list them: ")[2]))
    listed = typed(script, *words, *written).done().stdout
    again = typed("scripts/labels.py", run_folder(tmp_path / "runs"), *written).done().stdout
    numbers = [
        re.search(r"about (\d+)", each.partition("wrong labels:")[2] or each)[1] for each in (line, listed, again)
    ]
    assert len(set(numbers)) == 1 and int(numbers[0]) == pytest.approx(num_wrong, abs=1)
