"""-check of images with the values of their files, and the warning that 8 bits would lose most of their levels."""

import numpy as np
import pytest
from PIL import Image

from engine.check.images import check_images
from engine.quick_checks import OK, WARN
from tests.runs.engine.check.small_photos import sets_of
from tests.support.image_sets import noise
from tests.support.native_images import CHANNELS, draw, files, pixels, settings, settings_file, write
from tests.support.opened import open_sets
from tests.support.refusals import assert_names
from tests.support.runs import rows, typed

KINDS = "kinds of files"


@pytest.fixture
def native(tmp_path):
    return draw(tmp_path / "native")


def rows_of(config, *sets) -> dict[str, tuple[str, str]]:
    return {each.title: (each.verdict, f"{each.text} {each.remedy}") for each in check_images(config, *sets)}


def found_in(photos, *words) -> dict[str, tuple[str, str]]:
    config = settings(photos, *words).config
    return rows_of(config, *open_sets(config))


def change(photos, index: int, where, value: int) -> None:
    image = np.load(files(photos)[index])
    image[where] = value
    np.save(files(photos)[index], image)


# --- ranges, constant channels and plain images ---


@pytest.mark.long
def test_pixels_row_has_type_channels_and_range_of_each_channel(native):
    change(native, 3, (5, 6, 1), 60_000)
    files(native)[0].write_bytes(b"no image")
    verdict, text = found_in(native, "-opts", "DATA.MAX_BAD_FRACTION=0.5")["training pixels"]
    values = np.concatenate([np.load(path).reshape(-1, CHANNELS) for path in files(native)[1:]])
    assert verdict == OK
    spans = (f"{number}: {values[:, number].min()} to {values[:, number].max()}" for number in range(CHANNELS))
    assert_names(text, "uint16", "5 channels", *spans)
    assert found_in(native, "-opts", "DATA.MAX_BAD_FRACTION=0.5")["validation pixels"][0] == OK


@pytest.mark.long
def test_channel_without_detail_in_all_images_is_warned_of(native):
    for index in range(16):
        change(native, index, (slice(None), slice(None), 3), index)
    verdict, text = found_in(native)["training pixels"]
    assert verdict == WARN
    assert_names(text, "1 channel", "(3)", "3: 0 to 15")
    change(native, 9, (0, 0, 3), 99)
    assert found_in(native)["training pixels"][0] == OK, "one image has detail"


def test_images_of_one_value_are_warned_of_by_name(native):
    change(native, 2, slice(None), 0)
    change(native, 7, slice(None), 65535)
    verdict, text = found_in(native)["training pixels"]
    assert verdict == WARN
    assert_names(text, "2 images", files(native)[2], files(native)[7])


def test_single_readable_image_without_detail_is_not_called_a_constant_channel(native):
    for path in files(native)[1:]:
        path.write_bytes(b"no image")
    change(native, 0, (slice(None), slice(None), 3), 7)
    assert found_in(native, "-opts", "DATA.MAX_BAD_FRACTION=1")["training pixels"][0] == OK


def test_set_without_readable_images_has_no_row_of_pixels(native):
    config = settings(native).config
    sets = open_sets(config)
    for path in files(native):
        path.write_bytes(b"no image")
    found = rows_of(config, *sets)
    assert "training pixels" not in found and "validation pixels" in found


@pytest.mark.long
def test_check_of_a_run_reports_the_measured_limits(native, tmp_path):
    ended = typed("main_single_gpu.py", "-cfg", settings_file(native), "-output", tmp_path / "o", "-check").done()
    found = rows(ended.stdout)
    assert found["training pixels"][0] == OK and KINDS not in found
    assert_names(ended.stdout, "channel 0", "limits 1000 to 1899")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [(), ("MODEL.PRETRAINED=nowhere.pth",)], ids=str)
def test_check_tells_classes_apart_that_differ_in_brightness(tmp_path, wrong):
    """`wrong`: a setting for which the run cannot be planned."""
    scenes = [pixels(number) // 20 for number in range(8)]
    both = [scene * factor for scene in scenes for factor in (1, 20)]
    folder = write(tmp_path / "scenes", {"train": both, "val": [pixels(90), pixels(91) // 20]})
    words = ("-cfg", settings_file(folder), "-output", tmp_path / "o", "-check", *(["-opts", *wrong] if wrong else []))
    found = rows(typed("main_single_gpu.py", *words).stdout)
    assert found["duplicates"] == (OK, "no validation image is also a training image")


# --- levels that 8 bits lose ---


def deepen(photos, highest: int, part: str = "*") -> None:
    """Replace the photos by grey ones of 16 bits with values up to `highest`."""
    for number, path in enumerate(sorted(photos.glob(f"{part}/*/*.png"))):
        values = np.random.default_rng(number).integers(highest, size=(10, 12)).astype(np.uint16)
        values[0, 0] = highest
        Image.fromarray(values).save(path)


def warnings_of(photos, *options) -> list[str]:
    """Return the warnings of a run about its images."""
    return [note for note in sets_of(photos, *options)[2].notes if note.startswith("warning")]


GREY = "DATA.IMAGE_CHANNELS=1"


@pytest.mark.parametrize(("highest", "is_lost"), [(4095, True), (4096, False), (65535, False), (255, True)])
def test_files_of_16_bits_that_use_few_are_warned_of(photos, highest, is_lost):
    deepen(photos, highest)
    verdict, text = rows_of(*sets_of(photos))[KINDS]
    warnings = warnings_of(photos)
    assert (verdict, len(warnings)) == ((WARN, 1) if is_lost else (OK, 0))
    assert_names(text, "18 16-bit")
    if is_lost:
        assert_names(warnings[0], "DATA.PIXELS", "16-bit")
        assert_names(text, "DATA.PIXELS", "native")


def test_few_shallow_files_among_deep_ones_are_only_counted(photos):
    deepen(photos, 65535)
    deepen(photos, 4000, part="val")
    verdict, text = rows_of(*sets_of(photos))[KINDS]
    assert verdict == OK and "12 16-bit" in text and "6 16-bit" in text


@pytest.mark.parametrize("options", [(GREY, "DATA.PIXELS=native"), (GREY, "DATA.PIXELS=uint16")], ids=str)
def test_native_pixels_need_no_warning_about_levels(photos, options):
    deepen(photos, 4000)
    config, *sets = sets_of(photos, *options)
    assert KINDS not in rows_of(config, *sets)
    assert not warnings_of(photos, *options)


def test_photos_of_8_bits_are_not_warned_of(photos):
    assert not warnings_of(photos)
    deepen(photos, 4000)
    noise(9, 9).save(photos / "train/cat/0.png")
    assert not warnings_of(photos), "one of the first, middle and last images has 8 bits"
