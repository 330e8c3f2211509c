"""DATA.CACHE of images with the values of their files: their type, channels and pixels stay as in the files."""

import numpy as np
import pytest
from PIL import Image

from datasets.cache import CacheProgress, cache_image_sets, locate_cache
from datasets.pixels.rules import ImageReadError
from tests.support.configs import replaced
from tests.support.native_images import CHANNELS, draw, files, settings
from tests.support.opened import open_sets

BROKEN = 3


@pytest.fixture
def photos(tmp_path):
    """Draw images of several shapes, one of them unreadable."""
    draw(tmp_path / "photos", size=(33, 47))
    for number, path in enumerate(files(tmp_path / "photos")[:3]):
        np.save(path, np.load(path)[: 20 + number])
    files(tmp_path / "photos")[BROKEN].write_bytes(b"no image, and 25 bytes")
    return tmp_path / "photos"


def config_of(photos, cache: str = "disk", dtype: type | None = None, **data):
    """Return settings with a cache. If `dtype` is given, convert the values in the files to this type."""
    for path in [*files(photos), *files(photos, "val")] if dtype else []:
        if path != files(photos)[BROKEN]:
            np.save(path, (np.load(path) % 256).astype(dtype))
    config = settings(photos).config
    return replaced(config, DATA={"CACHE": cache, "CACHE_PATH": str(photos.parent / "cache"), **data})


def cached(config):
    sets = cache_image_sets(config, open_sets(config), CacheProgress(print, print))
    assert all(each.read_cached is not None for each in sets)
    return sets


def outcome(images, index: int) -> np.ndarray | str:
    """Return the pixels of an image, or the reason why it cannot be read."""
    try:
        return images.read(index)
    except ImageReadError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_cached_images_have_the_type_and_values_of_the_files(photos, dtype):
    config = config_of(photos, dtype=dtype)
    for before, after in zip(open_sets(config), cached(config), strict=True):
        for index in range(len(before)):
            if isinstance(expected := outcome(before, index), str):
                assert outcome(after, index) == expected and index == BROKEN
                continue
            found = after.read(index)
            assert found.dtype == dtype and found.shape[2] == CHANNELS and found.base is not None, "no copy"
            assert found.flags.aligned
            np.testing.assert_array_equal(found, expected)
    assert isinstance(outcome(open_sets(config)[0], BROKEN), str)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_cache_of_a_short_side_shrinks_images_as_pillow_does(photos, dtype):
    config = config_of(photos, 24, dtype, INTERPOLATION="bicubic")
    before, after = open_sets(config)[0], cached(config)[0]
    for index in (0, 2, 4, 7):
        image, found = before.read(index), after.read(index)
        assert found.dtype == dtype
        if min(image.shape[:2]) <= 24:
            np.testing.assert_array_equal(found, image)
            continue
        assert found.shape == (24, 24 * 47 // 33, CHANNELS)
        for channel in range(CHANNELS):
            picture = Image.fromarray(image[:, :, channel].astype(np.float32))
            expected = np.array(picture.resize((34, 24), Image.Resampling.BICUBIC))
            assert np.abs(found[:, :, channel] - expected.clip(0 if dtype == np.uint16 else None)).max() <= 0.6


def test_other_limits_use_the_same_cache_and_other_types_another(photos):
    config = config_of(photos)
    given = [{}, {"RANGE": (0.0, 4095.0)}, {"RGB": (2, 1, 0)}, {"PIXELS": "uint16"}]
    configs = [replaced(config, DATA=each) for each in given]
    keys = [locate_cache(each, open_sets(each)[0]).key for each in configs]
    assert len({*keys}) == 1
    other = config_of(photos, dtype=np.float32)
    assert locate_cache(other, open_sets(other)[0]).key not in keys
