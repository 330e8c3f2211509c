"""scripts/predict.py -attention: the maps that it writes, other output, which stays the same, and models without maps."""

import shutil

import pytest
import timm

from engine.predict.classifier import Classifier
from extras.attention_maps import Maps
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced, small_config
from tests.support.refusals import assert_names, refused
from tests.support.runs import run, typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def test_attention_maps_are_refused_for_models_without_token_grid(tmp_path):
    config = replaced(
        small_config(tmp_path), MODEL={"NAME": "crossvit_tiny_240"}, DATA={"IMAGE_CHANNELS": 3, "IMAGE_SIZE": 240}
    )
    found = Classifier(config, timm.create_model("crossvit_tiny_240"), ["a"], "x.pth", "", None)
    with refused(ConfigError, "-attention", "crossvit_tiny_240", 240):
        Maps.of(found, CPU, tmp_path, [])


def test_two_processes_write_the_same_attention_maps_as_one(trained, digits, tmp_path):
    seven, *images = [path for digit in "73" for path in sorted((digits / digit).iterdir())[:10]]
    images = [seven, *images, seven]  # three batches of 7
    words = [str(word) for word in (trained, *images, "-batch_size", 7, "-attention")]
    typed("scripts/predict.py", *words, tmp_path / "one", "-ngpus", 1).done()
    run("scripts/predict.py", *words, str(tmp_path / "two"), "-ngpus", "2").done()
    written = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(written) == len(images) and written == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in written:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_second_prediction_replaces_attention_maps_without_classifying_them(trained, digits, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, image in enumerate(sorted(digits.glob("[0-9]/*.png"))[:3]):
        shutil.copy(image, photos / f"{number}.png")
    words = ("scripts/predict.py", trained, photos, "-attention", photos / "maps")
    first = typed(*words).done().stdout
    after = sorted(photos.rglob("*"))
    assert len(first.splitlines()) == 3 and len(after) == 7
    assert typed(*words).done().stdout == first and sorted(photos.rglob("*")) == after


@pytest.mark.parametrize("name", ["loss.png", "photo.png"])
def test_attention_map_never_overwrites_another_picture(trained, digits, tmp_path, name):
    shutil.copy(trained / "loss.png", tmp_path / name)
    before, photo = (tmp_path / name).read_bytes(), tmp_path / "photos" / f"{name.removesuffix('.png')}.bmp"
    photo.parent.mkdir()
    shutil.copy(sorted(digits.glob("0/*.png"))[0], photo)
    typed("scripts/predict.py", trained, photo, "-attention", tmp_path).refused("-attention", tmp_path / name)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("words", cases_of("attention_maps-mistakes_of_attention_maps"))
def test_predict_exits_with_2_for_bad_attention_map_request(trained, words):
    ended = typed("scripts/predict.py", *words.format(run=trained).split())
    assert ended.returncode == 2 and not ended.stdout
    assert_names(ended.stderr, *names_of("attention_maps-mistakes_of_attention_maps", words))
