"""halfstep predict -attention: the maps that it writes, other output, which stays the same, and models without maps."""

import shutil

import pytest
import timm

from engine.predict.attention_maps import Maps
from engine.predict.classifier import Classifier
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced, small_config
from tests.support.refusals import assert_names, refused
from tests.support.runs import typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def test_attention_maps_are_refused_for_models_without_token_grid(tmp_path):
    config = replaced(
        small_config(tmp_path), MODEL={"NAME": "crossvit_tiny_240"}, DATA={"IMAGE_CHANNELS": 3, "IMAGE_SIZE": 240}
    )
    found = Classifier(config, timm.create_model("crossvit_tiny_240"), ["a"], "x.pth", "", None)
    with refused(ConfigError, "-attention", "crossvit_tiny_240", 240):
        Maps.of(found, CPU, tmp_path, [])


@pytest.mark.long
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
