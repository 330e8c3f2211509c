"""The commands that a run prints at its end."""

import re
import shlex
from pathlib import Path

import pytest

from datasets.sources.folder import find_test_folders
from tests.support.configs import SMALL
from tests.support.image_sets import draw_photos, load
from tests.support.pages import script_of
from tests.support.runs import run_folder, status_of, typed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signal_handlers")]


def train(photos: str) -> dict[str, str]:
    """Train one epoch on the photos in the current folder. Return {title: command} of the next steps."""
    Path("small.yaml").write_text(SMALL.replace("IMAGE_CHANNELS: 1", "IMAGE_CHANNELS: 3"))
    flags = ("-cfg", "small.yaml", "-dataset", "imagefolder", "-data_path", photos, "-batch_size", "4", "-epochs", "1")
    said = typed("main_single_gpu.py", *flags, "-output", "o").done().stdout
    lines = said.partition("\nnext:\n")[2].splitlines()
    return dict(re.split("  +", line.strip(), maxsplit=1) for line in lines)


@pytest.fixture
def photos(here) -> Path:
    for part, count in (("train", 4), ("val", 2)):
        draw_photos(here / "photos" / part, "cat", "dog", count=count)
    return here / "photos"


@pytest.mark.parametrize("name", ["test", "Test"])
def test_command_for_a_test_folder_scores_its_images(photos, name):
    draw_photos(photos / name, "dog", count=3)
    script, words = script_of(shlex.split(train("photos")["test"]))
    typed(script, *words, "-output", "evaluations").done()
    status = status_of(run_folder(Path("evaluations")))
    assert (status["kind"], status["raw"]["num_images"]) == ("eval", 3)


@pytest.mark.parametrize("test_classes", [["cat", "zebra"], []])
def test_test_folder_that_cannot_be_scored_gets_no_command(photos, test_classes):
    (photos / "test").mkdir()
    draw_photos(photos / "test", *test_classes)
    assert "test" not in train("photos")


def test_test_folder_that_validates_the_run_gets_no_command(photos):
    (photos / "val").rename(photos / "test")
    assert "test" not in train("photos")


def test_moved_data_gets_no_command(photos):
    draw_photos(photos / "test", "dog")
    _, val = load("imagefolder", photos)
    assert find_test_folders(val) == [photos / "test"]
    photos.rename(photos.with_name("moved"))
    assert find_test_folders(val) == []
