"""DATA.IMAGE_SIZE: the side of a square, or height x width, in each spelling."""

import pytest

from configs.load import load
from configs.schema import Shape
from configs.values import flatten, unflatten
from tests.support.modules import ROOT
from tests.support.refusals import refused
from utils.errors import ConfigError


def config_with(*words: str):
    return load(["-cfg", "vit_digits", *words]).config


@pytest.mark.parametrize(
    ("text", "value", "shape"),
    [
        ("32", 32, (32, 32)),
        ("+32", 32, (32, 32)),
        ("16x32", "16x32", (16, 32)),
        ("16X32", "16x32", (16, 32)),
        ("[16, 32]", "16x32", (16, 32)),
        ("32x32", 32, (32, 32)),
    ],
)
def test_size_has_one_value_for_all_spellings_and_survives_files(tmp_path, text, value, shape):
    config = config_with("-image_size", text)
    assert config.DATA.IMAGE_SIZE == value and config.DATA.shape == Shape(*shape)
    assert unflatten(flatten(config)) == config
    (tmp_path / "again.yaml").write_text(
        f"BASE: [{ROOT}/configs/vit_digits.yaml]\nDATA: {{IMAGE_SIZE: {text.lstrip('+')}}}\n"
    )
    assert load(["-cfg", str(tmp_path / "again.yaml")]).config.DATA.shape == Shape(*shape)


@pytest.mark.parametrize("text", ["0x10", "16x", "x16", "16x-4", "16x32x3", "16x9000", "x", "[]", "16*32", "0"])
def test_size_that_is_no_shape_is_refused(text):
    with refused(ConfigError, "flag -image_size", "DATA.IMAGE_SIZE", "HEIGHTxWIDTH"):
        config_with(f"-image_size={text}")


def test_schedule_of_squares_is_refused_with_another_shape():
    with refused(ConfigError, "TRAIN.SIZE_SCHEDULE", "DATA.IMAGE_SIZE, 16x32"):
        config_with("-image_size", "16x32", "-opts", "TRAIN.SIZE_SCHEDULE=0:16")


def test_crops_of_training_images_follow_the_shape_unless_set():
    def ratio_with(*words: str) -> tuple[float, ...]:
        return load(["-cfg", "finetune", *words]).config.DATA.CROP_RATIO

    assert ratio_with("-image_size", "32") == (3 / 4, 4 / 3)
    assert ratio_with("-image_size", "16x64") == pytest.approx((3, 16 / 3))
    assert ratio_with("-image_size", "64x16") == pytest.approx((3 / 16, 1 / 3))
    assert ratio_with("-image_size", "16x64", "-opts", "DATA.CROP_RATIO=[0.5,2]") == (0.5, 2)
