"""Limits, mean and deviation of each channel of the training images, and the settings that keep them."""

import re

import numpy as np
import pytest

from datasets.pixels.native import pixels as statistics
from datasets.pixels.native.pixels import describe_pixels, measure_pixels
from datasets.sources.images import FileStorage
from engine.report.image_sheets import small_copy
from tests.support.configs import replaced
from tests.support.native_images import CHANNELS, draw, files, measured, pixels, settings, write
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from tests.support.threads import Threads
from utils.errors import DataError

GREY = (20, 30)  # height and width


@pytest.fixture
def photos(tmp_path):
    return draw(tmp_path / "photos")


def measure_in(photos, *words, channels: int = CHANNELS) -> statistics.Statistics:
    config = settings(photos, *words, channels=channels).config
    return measure_pixels(config, open_sets(config)[0])


def values_in(photos) -> np.ndarray:
    """Return all pixels of the training images, float64 [pixels, C]."""
    images = (np.load(path) for path in files(photos))
    return np.concatenate([each.reshape(-1, each.shape[2]) for each in images]).astype(np.float64)


def grey_set(tmp_path, *images) -> statistics.Statistics:
    """Return the statistics of grey training images."""
    photos = write(tmp_path / "grey", {"train": [each[:, :, None] for each in images], "val": [np.ones((9, 9, 1))] * 2})
    for path in files(photos, "val"):
        np.save(path, np.ones((9, 9, 1), images[0].dtype))
    return measure_in(photos, channels=1)


# --- what is measured ---


def test_limits_are_percentiles_and_mean_and_deviation_are_of_scaled_values(photos):
    image = pixels()
    image[0, 0], image[1, 1] = 0, 9000
    np.save(files(photos)[0], image)
    found, values = measure_in(photos), values_in(photos)
    low, high = np.percentile(values, (0.1, 99.9), 0)
    scaled = np.clip((values - low) / (high - low), 0, 1)
    assert np.reshape(found.limits, (CHANNELS, 2)) == pytest.approx(np.stack([low, high], 1), rel=1e-5)
    assert (low > values.min(0)).all() and (high < values.max(0)).all(), "the percentiles are not the extremes"
    assert found.mean == pytest.approx(scaled.mean(0), rel=1e-5)
    assert found.deviation == pytest.approx(scaled.std(0), rel=1e-5)
    assert found.extremes == list(zip(values.min(0), values.max(0), strict=True))


EACH = (500, 1500, 600, 5000, 700, 6000, 800, 7000, 900, 8000)


@pytest.mark.parametrize("limits", [(500, 5600), EACH], ids=["for all", "for each"])
def test_named_limits_are_kept_and_mean_and_deviation_measured(photos, limits):
    config, _ = measured(settings(photos, "-opts", f"DATA.RANGE={list(limits)}"))
    low, high = np.broadcast_to(np.reshape(limits, (-1, 2)), (CHANNELS, 2)).T
    scaled = np.clip((values_in(photos) - low) / (high - low), 0, 1)
    assert np.array_equal(np.resize(config.DATA.RANGE, (CHANNELS, 2)), np.stack([low, high], 1))
    assert config.DATA.IMAGENET_MEAN == pytest.approx(scaled.mean(0), rel=1e-5)
    assert config.DATA.IMAGENET_STD == pytest.approx(scaled.std(0), rel=1e-5)
    assert scaled.max() == 1, "some values are above the limits"


MEAN, DEVIATION = (0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.6, 0.7, 0.8, 0.9)


@pytest.mark.parametrize("limits", [(), (0.0, 9000.0)], ids=["measured", "named"])
@pytest.mark.parametrize("names", ["IMAGENET_MEAN", "IMAGENET_STD", "IMAGENET_MEAN IMAGENET_STD"])
def test_typed_mean_or_deviation_is_kept_and_the_rest_measured(photos, limits, names):
    typed = {name: MEAN if name == "IMAGENET_MEAN" else DEVIATION for name in names.split()}
    words = [f"DATA.{name}={list(values)}" for name, values in typed.items()]
    range_words = [f"DATA.RANGE={list(limits)}"] if limits else []
    found = measure_in(photos, *(["-opts", *range_words] if limits else []))
    data = measured(settings(photos, "-opts", *words, *range_words))[0].DATA
    expected = {"IMAGENET_MEAN": found.mean, "IMAGENET_STD": found.deviation, "RANGE": limits or found.limits} | typed
    assert {name: getattr(data, name) for name in expected} == expected


def test_constant_channel_gets_limits_that_differ_and_a_warning(tmp_path):
    found = grey_set(tmp_path, *[np.full(GREY, 7, np.uint16)] * 4)
    assert found.limits == (7, 8) and found.mean == (0,) and found.deviation == (0,)
    assert any("channel 0: all values between its limits are the same" in line for line in describe_pixels(found))


@pytest.mark.parametrize("value", [20_000_000, -1_234_567.5])
def test_constant_channel_of_large_floats_gets_limits_that_differ(tmp_path, value):
    low, high = grey_set(tmp_path, *[np.full(GREY, value, np.float32)] * 4).limits
    assert low < high and np.float32(low) < np.float32(high) and low == pytest.approx(value, rel=1e-6)


def test_limits_of_small_range_around_a_large_level_differ(tmp_path):
    image = 1_000_000 + np.linspace(0, 0.5, 600, dtype=np.float32).reshape(GREY)
    low, high = grey_set(tmp_path, *[image] * 4).limits
    assert high - low == pytest.approx(0.5, abs=0.1)


def test_few_bright_small_copy_dark_images_are_kept(tmp_path):
    image = np.zeros((100, 100), np.uint16)
    image[3, 4] = 4000
    found = grey_set(tmp_path, *[image] * 4)
    assert found.limits == (0, 4000)
    assert found.mean == pytest.approx([1e-4]) and found.deviation == pytest.approx([1e-2], rel=1e-3)


def test_unreadable_images_are_left_out_of_the_measurement(photos):
    config = settings(photos).config
    train = open_sets(config)[0]
    readable = np.setdiff1d(np.arange(len(train)), [2, 5])
    expected = measure_pixels(config, train.take(readable))
    for index in (2, 5):
        files(photos)[index].write_bytes(b"no image")
    assert measure_pixels(config, train) == expected


def test_measurement_without_any_readable_image_names_the_first(photos):
    config = settings(photos).config
    train = open_sets(config)[0]
    for path in files(photos):
        path.write_bytes(b"no image")
    with refused(DataError, files(photos)[0]):
        measure_pixels(config, train)


def indices_read(photos, monkeypatch, seed: int) -> list[int]:
    """Return the images that a measurement reads."""
    found, read = [], FileStorage.read
    config = settings(photos, "-opts", f"SEED={seed}").config
    train = open_sets(config)[0]
    with monkeypatch.context() as patch:
        patch.setattr(FileStorage, "read", lambda self, row, pixels: found.append(row) or read(self, row, pixels))
        measure_pixels(config, train)
    return sorted(found)


def test_seed_draws_the_images_of_a_large_set(photos, monkeypatch):
    monkeypatch.setattr(statistics, "MOST_IMAGES", 5)
    drawn = [indices_read(photos, monkeypatch, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and all(len({*each}) == 5 for each in drawn)
    monkeypatch.setattr(statistics, "MOST_IMAGES", 1000)
    assert indices_read(photos, monkeypatch, 1) == [*range(16)]


def test_small_copy_large_images_are_drawn_and_close_to_all(photos, monkeypatch):
    whole = measure_in(photos)
    monkeypatch.setattr(statistics, "MOST_VALUES", 16 * CHANNELS * 200)  # 200 of 1152 pixels of each image
    found = [measure_in(photos) for _ in range(2)]
    assert found[0] == found[1] != whole
    assert found[0].mean == pytest.approx(whole.mean, abs=0.02)
    assert found[0].limits == pytest.approx(whole.limits, rel=0.01)


class Ranks(Threads):
    """Simulated processes; one of them can work for all."""

    class Rank(Threads.Rank):
        def first(self, task, *types):
            return self.join([task()] if self.is_first else [])[0]


def test_one_process_measures_and_all_have_its_values(photos, monkeypatch):
    loaded, calls = settings(photos), []
    alone, _ = measured(loaded)
    real = statistics.measure_pixels
    monkeypatch.setattr(statistics, "measure_pixels", lambda *given: calls.append(1) or real(*given))
    found = Ranks(2).run(lambda process: measured(loaded, process=process)[0])
    assert found == [alone] * 2 and len(calls) == 1


# --- what is said ---


def test_log_has_limits_mean_and_deviation_in_units_of_the_files(photos):
    lines, values = [*measured(settings(photos))[1].notes], values_in(photos)
    (line,) = [line for line in lines if line.startswith("channel 4:")]
    numbers = [float(each) for each in re.findall(r"[\d.]+", line.partition(":")[2])]
    low, high = np.percentile(values[:, 4], (0.1, 99.9))
    assert numbers == pytest.approx([low, high, values[:, 4].mean(), values[:, 4].std()], rel=1e-3)
    assert not any("warning" in each for each in lines)


@pytest.mark.parametrize("value", [2000, 2400, 3200], ids=["inside", "near", "far"])
def test_warning_names_values_far_outside_of_the_limits(photos, value):
    image = pixels()
    image[0, 0, 1] = value
    np.save(files(photos)[0], image)
    config = settings(photos, "-opts", "DATA.RANGE=[0,9000,1900,2500,0,9000,0,9000,0,9000]").config
    found = measure_pixels(config, open_sets(config)[0])
    warnings = [line for line in describe_pixels(found) if line.startswith("warning")]
    assert len(warnings) == (value == 3200)
    if warnings:
        assert_names(warnings[0], "channel 1", "3200", "1900", "2500", "DATA.RANGE")


def test_settings_get_the_type_that_the_files_have(photos):
    assert measured(settings(photos))[0].DATA.PIXELS == "uint16"
    for path in (*files(photos), *files(photos, "val")):
        np.save(path, np.load(path).astype(np.float64))
    assert measured(settings(photos))[0].DATA.PIXELS == "float32"
    with refused(DataError, "float32", "uint16"):
        measured(settings(photos, "-opts", "DATA.PIXELS=uint16"))


def test_pictures_of_both_parts_use_the_measured_limits(photos):
    config, val = measured(settings(photos))
    low, high = np.reshape(config.DATA.RANGE, (CHANNELS, 2))[:3].T
    image = val.read(0)
    expected = np.rint(255 * np.clip((image[:, :, :3] - low) / (high - low), 0, 1))
    assert np.abs(val.pixels.shown(image) - expected).max() <= 1
    assert small_copy(val, lambda height, width: (0, 0, 1, 1), 0).mean((0, 1)) == pytest.approx(
        expected.mean((0, 1)).tolist(), abs=5
    )
    chosen = replaced(config, DATA={"RGB": (4, 2, 0)})
    assert np.abs(val.pixels.of(chosen.DATA).shown(image)[:, :, 2] - expected[:, :, 0]).max() <= 1
