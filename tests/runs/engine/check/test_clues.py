"""The row of -check about what a file tells without its picture."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.check.clues import DATE, check_clues
from engine.quick_checks import OK, WARN
from tests.runs.engine.check.small_photos import sets_of
from tests.support.refusals import assert_names

CLASSES, PER_CLASS = ("actions", "animals", "devices"), 60


def finding_of(folder: Path, write) -> tuple[str, str]:
    """Return verdict and text for a folder of random pictures. `write(number, label, image, path)` saves one."""
    drawn = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            image = Image.fromarray(drawn.integers(256, size=(24, 24, 3), dtype=np.uint8))
            write(number, label, image, folder / name / f"{drawn.integers(10**9):09d}")
    _, images, _ = sets_of(folder, "DATA.VAL_FRACTION=0.1")
    sides = np.array([images.read(index).shape[:2] for index in range(len(images))])
    finding = check_clues(images, np.arange(len(images)), sides)
    return finding.verdict, finding.text


def resized(number, label, image, path):
    side = 16 if label == 0 and number % 5 else 40
    image.resize((side, side)).save(f"{path}.png")


def reshaped(number, label, image, path):
    image.resize((48, 16) if label == 1 and number % 5 else (32, 24)).save(f"{path}.png")


def of_other_format(number, label, image, path):
    image.save(f"{path}.gif" if label == 2 else f"{path}.png")


def of_other_mode(number, label, image, path):
    (image.convert("L") if label == 0 else image).save(f"{path}.png")


def transparent(number, label, image, path):
    (image.convert("RGBA") if label == 1 else image).save(f"{path}.png")


def named(number, label, image, path):
    image.save(path.with_name(("IMG_" if label == 0 else "DSC") + path.name + ".png"))


def dated(number, label, image, path):
    exif = Image.Exif()
    exif[DATE] = f"2026:0{label + 1}:03 10:00:00"
    image.save(f"{path}.jpg", exif=exif)


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "clue"),
    [
        (resized, "size"),
        (reshaped, "shape"),
        (of_other_format, "format"),
        (of_other_mode, "colour mode"),
        (transparent, "transparency"),
        (named, "first letters of the name"),
        (dated, "date"),
    ],
)
def test_clue_that_predicts_the_class_is_named_with_its_share(tmp_path, write, clue):
    verdict, text = finding_of(tmp_path, write)
    assert verdict == WARN
    assert f"from the {clue} alone for " in text and "always the largest class: 3" in text


def plain(number, label, image, path):
    image.save(f"{path}.png")


def of_any_kind(number, label, image, path):
    side = 20 + number % 7
    image.resize((side, side + number % 3)).save(f"{path}.png" if number % 2 else f"{path}.bmp")


def named_like_its_class(number, label, image, path):
    image.save(path.with_name(f"{path.parent.name[:3]}{number}.png"))


@pytest.mark.long
@pytest.mark.parametrize("write", [plain, of_any_kind, named_like_its_class])
def test_clues_that_predict_nothing_are_no_warning(tmp_path, write):
    verdict, text = finding_of(tmp_path, write)
    assert verdict == OK
    assert_names(text, "size", "format", "none predicts the class")
