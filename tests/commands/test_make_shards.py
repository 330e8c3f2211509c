"""halfstep make-shards: its output, also after a kill and a restart, and refused input."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from datasets.order import shuffled
from datasets.sources import shards
from datasets.sources.images import FileStorage
from scripts import make_shards
from tests.support.cases import cases_of, names_of
from tests.support.image_sets import draw, load, shades
from tests.support.refusals import refused
from utils.errors import ConfigError, DataError

pytestmark = pytest.mark.slow


def call(*arguments) -> int:
    return make_shards.main([str(each) for each in arguments])


@pytest.fixture
def photos(tmp_path) -> Path:
    for part, count in (("train", 7), ("val", 2)):
        for number in range(count):
            draw(tmp_path / "photos" / part / "ant" / f"{number}.JPEG", number)
            draw(tmp_path / "photos" / part / "bee" / f"{number}.png", number + 100)
    return tmp_path / "photos"


def test_shards_of_given_size_are_read_by_their_index(tmp_path, photos, monkeypatch):
    call("-dataset", "imagefolder", "-data_path", photos, "-out", tmp_path / "out", "-samples_per_shard", 5)
    names = [path.name for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert names == ["train-000000.tar", "train-000001.tar", "train-000002.tar", "val-000000.tar"]
    assert (tmp_path / "out" / "classes.txt").read_text() == "ant\nbee\n"

    monkeypatch.setattr(shards, "scan", None)
    train, val = load("shards", tmp_path / "out")
    assert train.classes == ["ant", "bee"] and sorted(shades(train)) == [*range(7), *range(100, 107)]
    assert shades(train) != sorted(shades(train)) and shades(val) == [0, 1, 100, 101]


def test_missing_shards_before_and_after_a_kept_one_get_their_own_images(tmp_path, photos):
    flags = ("-dataset", "imagefolder", "-data_path", photos, "-out", tmp_path / "out", "-samples_per_shard", 5)
    call(*flags)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for number in (0, 2):
        (tmp_path / "out" / f"train-{number:06d}.tar").unlink()
    call(*flags)
    shards = [name for name in before if name.endswith(".tar")]
    assert all((tmp_path / "out" / name).read_bytes() == before[name] for name in shards)


def test_output_folder_with_other_files_is_refused(tmp_path, photos):
    flags = ("-dataset", "imagefolder", "-data_path", photos, "-out", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with refused(ConfigError, "-output", tmp_path / "out"):
        call(*flags)
    (tmp_path / "out" / "thesis.tex").unlink()
    call(*flags)
    with refused(ConfigError, "-output", tmp_path / "out"):
        call(*flags, "-shuffle_seed", 1)


def test_in_memory_images_become_png_shards_that_can_be_resharded(tmp_path):
    call("-dataset", "digits", "-out", tmp_path / "out", "-opts", "DATA.IMAGE_CHANNELS=1")
    digits, _ = load("digits")
    train, val = load("shards", tmp_path / "out")
    assert (len(train), len(val)) == (360, 90) and train.name(0).endswith("00000000.png")
    assert all(
        np.array_equal(train.read(position), digits.read(index))
        for position, index in enumerate(shuffled(len(digits), 0)[:20])
    )
    call("-dataset", "shards", "-data_path", tmp_path / "out", "-out", tmp_path / "again", "-samples_per_shard", 500)
    again, _ = load("shards", tmp_path / "again")
    assert np.array_equal(again.read(0), train.read(shuffled(len(train), 0)[0]))
    assert json.loads((tmp_path / "again" / "shards.json").read_text())["classes"] == 10


def test_unreadable_image_is_named_by_make_shards(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(FileStorage, "open_file", Mock(side_effect=PermissionError(13, "Permission denied")))
    with refused(DataError, photos / "train"):
        call("-dataset", "imagefolder", "-data_path", photos, "-out", tmp_path / "out")


@pytest.mark.parametrize("words", cases_of("mistakes-of_make_shards"))
def test_make_shards_command_line_mistakes_are_reported(tmp_path, words):
    with refused(ConfigError, *names_of("mistakes-of_make_shards", words)):
        call(*words.split(), "-out", tmp_path / "out")
