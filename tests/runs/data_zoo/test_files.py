"""Files from cameras and scanners give the right pixels or a clear error: read directly, cached, and from shards."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from datasets.pixels import Pixels, decode
from datasets.pixels.kinds import pixels_of
from datasets.pixels.rules import ImageReadError
from datasets.sources.torchvision_sets import TorchvisionStorage
from scripts import make_shards
from tests.runs.data_zoo.files import (
    GREY,
    HELD,
    PICTURE,
    XMP,
    animation,
    edited_photo,
    encoded,
    grey_16_bits,
    hidden_colours,
    photo,
)
from tests.support.image_sets import load, settings
from tests.support.refusals import refused
from utils.errors import DataError

pytestmark = pytest.mark.slow

MEAN = (0.2, 0.4, 0.6)
BACKGROUND = (51, 102, 153)


def folder(root: Path, contents: dict[str, bytes]) -> Path:
    """Write the files as training images of two classes, and the first file of each as a validation image."""
    for part, names in (("train", contents), ("val", list(contents)[:1])):
        for name in ("ant", "bee"):
            (root / part / name).mkdir(parents=True)
            for file in names:
                (root / part / name / file).write_bytes(contents[file])
    return root


def read_all(image_set) -> list[np.ndarray]:
    return [image_set.read(index) for index in range(len(image_set))]


def read(content: bytes, channels: int = 3, **rules) -> np.ndarray:
    return decode.decode(content, Pixels(channels, **rules))


def assert_close(pixels: np.ndarray, wanted: np.ndarray, tolerance: int = 12) -> None:
    assert pixels.shape == wanted.shape and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert np.abs(pixels.astype(int) - wanted).max() <= tolerance


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", HELD)
def test_every_exif_orientation_is_read_upright(form, orientation, monkeypatch):
    content = photo(form, orientation)
    assert_close(read(content, applies_exif=True), PICTURE)
    for applies, word in ((True, "applied"), (False, "ignored")):
        kinds = Pixels(3, applies_exif=applies).kinds(lambda: content)
        assert kinds == [f"EXIF-rotated ({word})"] * (orientation > 1)
    monkeypatch.setattr(decode, "simplejpeg", None)
    assert_close(read(content, applies_exif=True), PICTURE)


def as_pillow_turns(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("style", XMP)
def test_xmp_orientation_is_read_as_in_pillow(form, style, monkeypatch):
    for orientation in (*HELD, 9):
        content = edited_photo(form, orientation, style)
        assert np.array_equal(read(content, applies_exif=True), as_pillow_turns(content)), orientation
        assert_close(read(content, applies_exif=True), PICTURE)
        with monkeypatch.context() as patched:
            patched.setattr(decode, "simplejpeg", None)
            assert np.array_equal(read(content, applies_exif=True), as_pillow_turns(content)), orientation


def test_exif_orientation_overrides_xmp_and_may_span_segments():
    for turn in (None, 0, 1, 6):
        exif = Image.Exif()
        exif[0x010F] = "maker"
        if turn is not None:
            exif[0x0112] = turn
        content = edited_photo("JPEG", 8, exif=exif)
        assert np.array_equal(read(content, applies_exif=True), as_pillow_turns(content)), turn
    content = edited_photo("JPEG", 8)
    start = content.index(b"\xff\xe1")
    segment = content[start : start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")]
    later = content.replace(segment, segment.replace(b'"8"', b'"3"') + segment)  # the last XMP segment counts
    assert np.array_equal(read(later, applies_exif=True), as_pillow_turns(later))
    whole = photo("JPEG", 6)
    start = whole.index(b"Exif\0\0")
    end = start - 2 + int.from_bytes(whole[start - 2 : start], "big")
    parts = [whole[start:end][:20], b"Exif\0\0" + whole[start:end][20:]]
    segments = b"".join(b"\xff\xe1" + (len(part) + 2).to_bytes(2, "big") + part for part in parts)
    divided = whole[: start - 4] + segments + whole[end:]
    assert np.array_equal(read(divided, applies_exif=True), as_pillow_turns(divided))
    assert_close(read(divided, applies_exif=True), PICTURE)


@pytest.mark.parametrize("between", [b"\xff", b"\xff\xff\xff", b"\0\0"])
@pytest.mark.parametrize("make", [photo, edited_photo])
def test_bytes_between_segments_leave_the_orientation_as_in_pillow(make, between, monkeypatch):
    content = make("JPEG", 6)
    start = content.index(b"\xff\xe1")
    filled = content[:start] + between + content[start:]
    for _ in range(2):
        assert np.array_equal(read(filled, applies_exif=True), as_pillow_turns(filled))
        assert_close(read(filled, applies_exif=True), PICTURE)
        monkeypatch.setattr(decode, "simplejpeg", None)


@pytest.mark.parametrize("make", [photo, edited_photo])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_ignored_orientation_leaves_pixels_as_stored(make, form):
    for orientation in HELD:
        lying = Image.fromarray(PICTURE)
        lying = lying.transpose(HELD[orientation]) if orientation > 1 else lying
        assert_close(read(make(form, orientation)), np.array(lying))


@pytest.mark.parametrize(
    "options", [{"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}, {"save_all": True}]
)
def test_tiff_orientation_is_applied_only_on_request(options):
    for orientation in HELD:
        exif, image = Image.Exif(), Image.fromarray(PICTURE)
        exif[0x0112] = orientation
        stored = image.transpose(HELD[orientation]) if orientation > 1 else image
        more = {"append_images": [Image.new("RGB", (5, 7))]} if "save_all" in options else {}
        content = encoded(stored, "TIFF", exif=exif, **options, **more)
        assert np.array_equal(read(content), np.array(stored))
        assert np.array_equal(read(content, applies_exif=True), as_pillow_turns(content))
        assert np.array_equal(read(content, 1)[:, :, 0], np.array(stored.convert("L")))


def test_exif_is_applied_by_default_except_in_benchmark_datasets(tmp_path):
    root = folder(tmp_path / "photos", {"6.jpg": photo("JPEG", 6)})
    (root / "train_list.txt").write_text("train/ant/6.jpg 0\ntrain/bee/6.jpg 1\n")
    (root / "val_list.txt").write_text("val/ant/6.jpg 0\nval/bee/6.jpg 1\n")
    (root / "train.csv").write_text("image_path,target\ntrain/ant/6.jpg,0\ntrain/bee/6.jpg,1\n")
    (root / "val.csv").write_text("image_path,target\nval/ant/6.jpg,0\nval/bee/6.jpg,1\n")
    lying = PICTURE.shape[1], PICTURE.shape[0], 3
    for dataset, shape in (("imagefolder", PICTURE.shape), ("csv", PICTURE.shape), ("imagenet2012", lying)):
        assert load(dataset, root)[0].read(0).shape == shape
        assert load(dataset, root, EXIF="apply")[0].read(0).shape == PICTURE.shape
        assert load(dataset, root, EXIF="ignore")[0].read(0).shape == lying


@pytest.mark.parametrize("damage", [slice(20, 24), slice(12, 40)])
def test_image_with_damaged_exif_is_still_read(damage):
    content = bytearray(photo("JPEG", 6))
    start = content.index(b"Exif")
    content[start + damage.start : start + damage.stop] = b"\xff" * (damage.stop - damage.start)
    assert read(bytes(content), applies_exif=True).size == PICTURE.size


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_16_bit_images_are_scaled_and_32_bit_images_refused(form):
    assert read(grey_16_bits(form), 1)[:, :, 0].tolist() == GREY.tolist()
    assert read(grey_16_bits(form), 3).tolist() == np.dstack([GREY] * 3).tolist()
    full = encoded(np.array([[0, 128, 129, 65535]], np.uint16), form)
    assert read(full, 1).ravel().tolist() == [0, 0, 1, 255]
    for kind in (np.float32, np.int32):
        with refused(ImageReadError, "32 bits"):
            read(encoded(np.arange(6, dtype=kind).reshape(2, 3), "TIFF"))


@pytest.mark.parametrize(("mode", "form"), [("RGBA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF"), ("P", "PNG")])
def test_transparent_pixels_show_the_mean_colour(tmp_path, mode, form):
    root = folder(tmp_path / "photos", {f"a.{form.lower()}": hidden_colours(mode, form)})
    wanted = PICTURE.copy()
    wanted[:8] = BACKGROUND
    assert_close(load("imagefolder", root, IMAGENET_MEAN=MEAN)[0].read(0), wanted, 0)


def test_transparent_grey_pixels_show_the_mean_shade():
    content = encoded(np.dstack([GREY, np.where(GREY > 100, 255, 0).astype(np.uint8)]), "PNG")
    background = pixels_of(settings("imagefolder", IMAGE_CHANNELS=1, IMAGENET_MEAN=MEAN).DATA).background
    assert background == (51, 51, 51)
    assert read(content, 1, background=background)[:, :, 0].tolist() == np.where(GREY > 100, GREY, 51).tolist()
    content = encoded(Image.fromarray(np.array([[0, 65535]], np.uint16)), "PNG", transparency=65535)
    assert read(content, 1, background=(9, 9, 9)).ravel().tolist() == [0, 9]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_first_animation_frame_is_read_as_displayed(form):
    wanted = np.full((32, 40, 3), BACKGROUND)
    wanted[8:24, 8:32] = PICTURE
    wanted[0, 0] = wanted[-1, -1] = (250, 10, 10)
    assert_close(read(animation(form), background=BACKGROUND), wanted, 0)


@pytest.mark.parametrize("name", ["a.avif", "a.heic", "a.HIF"])
def test_phone_photos_in_newer_formats_are_found_and_read(tmp_path, name):
    root = folder(tmp_path / "photos", {name: photo("AVIF" if name == "a.avif" else "HEIF")})
    assert_close(load("imagefolder", root)[0].read(0), PICTURE)


def test_missing_pillow_heif_is_reported_if_data_has_heif_photos(tmp_path, monkeypatch):
    root = folder(tmp_path / "photos", {"a.jpg": photo("JPEG"), "b.heic": photo("HEIF")})
    flags = ["-dataset", "imagefolder", "-data_path", str(root), "-output", str(tmp_path / "shards")]
    assert make_shards.main(flags) == 0
    without = tuple(each for each in decode.IMAGE_ENDINGS if decode.READ_BY.get(each) != "pillow_heif")
    monkeypatch.setattr("datasets.sources.folder.IMAGE_ENDINGS", without)
    train, val = load("imagefolder", root)
    assert len(train) == 2 and any(".heic 2" in note and "pip install pillow-heif" in note for note in val.notes)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    in_shards, _ = load("shards", tmp_path / "shards")  # shards that another machine made
    assert len(in_shards) == 4
    with refused(ImageReadError, "pip install pillow-heif"):
        read_all(in_shards)


def test_class_folder_whose_files_only_native_pixels_read_says_so(tmp_path):
    root = tmp_path / "photos"
    for name in ("ant/a.jpg", "bee/a.npy"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(photo("JPEG"))
    with refused(DataError, root / "bee", "no images in this folder", ".npy", "DATA.PIXELS=native reads"):
        load("imagefolder", root)


def test_exif_orientation_also_applies_to_torchvision_images():
    lying = Image.open(io.BytesIO(photo("PNG", 6)))
    for applies, shape in ((True, PICTURE.shape), (False, (24, 16, 3))):
        assert TorchvisionStorage([(lying, 0)], "x").read(0, Pixels(3, applies)).shape == shape


@pytest.fixture
def unusual(tmp_path) -> Path:
    files = {f"{turn}.jpg": photo("JPEG", turn) for turn in HELD}
    files |= {"turned.tif": photo("TIFF", 6), "edited.jpg": edited_photo("JPEG", 6)}
    files |= {"alpha.png": hidden_colours("RGBA", "PNG"), "16.png": grey_16_bits("PNG"), "a.heic": photo("HEIF")}
    return folder(tmp_path / "photos", files)


def test_shards_have_the_same_pixels_as_the_image_files(tmp_path, unusual):
    flags = ["-dataset", "imagefolder", "-data_path", str(unusual), "-output", str(tmp_path / "shards")]
    assert make_shards.main(flags) == 0
    for exif in ("apply", "ignore"):
        wanted = [pixels.tolist() for pixels in read_all(load("imagefolder", unusual, EXIF=exif)[0])]
        in_shards = [pixels.tolist() for pixels in read_all(load("shards", tmp_path / "shards", EXIF=exif)[0])]
        assert sorted(in_shards) == sorted(wanted)
