"""The pixels of a graph that takes photos."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from configs.schema import Data
from datasets.pixels.decode import to_array
from datasets.pixels.kinds import pixels_of
from datasets.transforms.crop import EvalTransform
from engine.evaluation.image_test import ImageTest
from engine.export.photo import Photo, drawn_photos, refuse_unsupported
from tests.support.properties import examples
from tests.support.refusals import refused
from utils.errors import ConfigError

DATA = replace(Data(), IMAGE_SIZE=32, CROP_PCT=0.875)


def both(photo: np.ndarray, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of halfstep predict and of the graph."""
    expected = torch.empty((data.IMAGE_CHANNELS, *data.shape), dtype=torch.uint8)
    EvalTransform(data)(to_array(Image.fromarray(photo), pixels_of(data)), expected)
    with torch.compiler.set_stance("force_eager"):  # torch.cond would be compiled for each size of a photo
        found = Photo(data)(torch.from_numpy(photo))
    return expected.numpy().astype(int), found.numpy().astype(int)


@pytest.mark.slow
@examples(60)
@given(
    st.sampled_from(["bilinear", "bicubic"]),
    st.sampled_from(["center", "squash"]),
    st.integers(1, 200),
    st.integers(1, 200),
    st.sampled_from([0.6, 0.875, 1.0]),
    st.sampled_from([32, "20x50", "48x16"]),
)
def test_pixels_differ_by_at_most_one_for_photos_of_any_size(interpolation, mode, height, width, share, size):
    data = replace(DATA, INTERPOLATION=interpolation, CROP_MODE=mode, CROP_PCT=share, IMAGE_SIZE=size)
    photo = np.random.default_rng(height).choice([0, 3, 128, 255], (height, width, 3)).astype(np.uint8)
    expected, found = both(photo, data)
    assert np.abs(expected - found).max() <= 1


@pytest.mark.long
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("is_height_first", [False, True])
def test_nearly_all_pixels_of_drawn_photos_are_equal(monkeypatch, interpolation, is_height_first):
    monkeypatch.setattr("datasets.pixels.pillow_resizes_height_first", lambda: is_height_first)
    monkeypatch.setattr("engine.export.photo.pillow_resizes_height_first", lambda: is_height_first)
    data = replace(DATA, IMAGE_SIZE=224, INTERPOLATION=interpolation)
    differences = [np.abs(np.subtract(*both(photo, data))) for photo in drawn_photos()]
    assert max(each.max() for each in differences) <= 1
    assert np.mean([(each > 0).mean() for each in differences]) < 1e-3


@pytest.mark.slow
def test_grey_model_gets_pillows_grey():
    photo = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    found = Photo(replace(DATA, IMAGE_CHANNELS=1, CROP_PCT=1.0))(torch.from_numpy(photo))
    assert (found[0].numpy() == np.asarray(Image.fromarray(photo).convert("L"))).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_transparent_pixels_get_the_colour_that_datasets_put_behind_them(channels):
    every = np.arange(256, dtype=np.uint8)  # each value with each opacity
    shades, opacity = np.meshgrid(every, every)
    photo = np.stack([shades, shades[::-1], shades // 2, opacity], 2)
    data = replace(DATA, IMAGE_CHANNELS=channels, IMAGE_SIZE=256, CROP_PCT=1.0, IMAGENET_MEAN=(0.1, 0.5, 0.93))
    expected, found = both(photo, data)
    assert (found == expected).all()
    assert found[:, 0, 0].tolist() == ([26] if channels == 1 else [26, 128, 237]), "a pixel that cannot be seen"


def test_drawn_photos_are_the_same_in_each_call():
    for one, again in zip(drawn_photos(), drawn_photos(), strict=True):
        np.testing.assert_array_equal(one, again)


@pytest.mark.parametrize(
    ("setting", "value"), [("INTERPOLATION", "lanczos"), ("CROP_MODE", "border"), ("CROP_PCT", 1.1)]
)
def test_preparation_that_the_graph_lacks_is_refused_by_name(setting, value):
    refuse_unsupported(DATA)
    with refused(ConfigError, "-photo", f"DATA.{setting}", value):
        refuse_unsupported(replace(DATA, **{setting: value}))


@pytest.mark.parametrize(
    ("num_other", "cost", "most_lost", "is_close"),
    [(0, 1.0, 1.83, True), (3, 0.05, 0.21, True), (3, 1.0, 4.19, False), (20, 0.01, 0.15, False), (206, 1, 100, False)],
)
def test_other_answers_cost_at_most_their_share_times_their_probability(num_other, cost, most_lost, is_close):
    int8 = pytest.importorskip("engine.export.int8", reason="needs onnx and onnxruntime")
    agreement = int8.Agreement(206, num_other, cost)
    assert agreement.most_lost == pytest.approx(most_lost, abs=0.01) and agreement.is_close == is_close
    assert f"{num_other} of 206" in str(agreement)


def test_number_of_images_that_is_enough_makes_the_interval_narrow_enough():
    int8 = pytest.importorskip("engine.export.int8", reason="needs onnx and onnxruntime")
    number = int8.images_needed(ImageTest(206, 2, 1))
    factor = number / 206
    larger = ImageTest(number, round(2 * factor), round(factor))
    assert number > 206 and -2.1 < larger.interval[0] < -1.5
    assert int8.images_needed(ImageTest(206, 9, 1)) is None, "the accuracy is 4 points lower"
