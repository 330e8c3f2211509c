"""Decoding of image files, compared with Pillow."""

import io
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import ExifTags, Image, ImageFile

from datasets.pixels import Pixels
from datasets.pixels.decode import decode
from datasets.pixels.rules import ImageReadError
from tests.support.image_sets import files_with, noise, png
from tests.support.refusals import refused


def read(file: Path, channels: int = 3, **rules) -> np.ndarray:
    return files_with(file.parent, [file.name], [0], ["ant"], Pixels(channels, **rules)).read(0)


@pytest.mark.parametrize("mode", ["RGB", "P", "CMYK", "1", "L"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_mode_converts_as_in_pillow(tmp_path, mode, channels):
    file = tmp_path / "image"
    noise(7, 6, mode).save(file, format="TIFF")
    wanted = {1: "L", 3: "RGB"}[channels]
    got = read(file, channels)
    with Image.open(file) as image:
        assert image.mode == mode
        assert got.shape == (6, 7, channels) and got.tobytes() == image.convert(wanted).tobytes()


JPEGS = {
    "colour": ("RGB", {}),
    "whole chroma": ("RGB", {"subsampling": 0}),
    "progressive": ("RGB", {"progressive": True}),
    "grey": ("L", {}),
    "CMYK": ("CMYK", {}),
    "best": ("RGB", {"quality": 100}),
}


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_pixels_match_pillow_with_either_decoder(kind, channels, monkeypatch):
    mode, options = JPEGS[kind]
    buffer = io.BytesIO()
    noise(61, 45).convert(mode).save(buffer, format="JPEG", **options)
    with Image.open(buffer) as image:
        wanted = np.array(image.convert("RGB" if channels == 3 else "L")).reshape(45, 61, channels)
    used = []
    decode_jpeg = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args: used.append(1) or decode_jpeg(*args))
    fast = decode(buffer.getvalue(), Pixels(channels))
    assert bool(used) == (kind == "grey" or (channels == 3 and kind != "CMYK"))
    monkeypatch.setattr("datasets.pixels.decode.simplejpeg", None)
    assert np.array_equal(fast, wanted) and np.array_equal(decode(buffer.getvalue(), Pixels(channels)), wanted)


def half(form: str) -> bytes:
    buffer = io.BytesIO()
    noise(64, 64).save(buffer, format=form)
    return buffer.getvalue()[: buffer.tell() // 2]


BROKEN = {
    "half a JPEG": (half("JPEG"), "OSError"),
    "half a PNG": (half("PNG"), "OSError"),
    "empty": (b"", "UnidentifiedImageError"),
    "text": (b"<html>", "UnidentifiedImageError"),
    "no AVIF": (b"\0\0\0\x18ftypavif" + bytes(30), "UnidentifiedImageError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_image_raises_image_read_error_with_reason(tmp_path, kind):
    content, reason = BROKEN[kind]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    (tmp_path / "image").write_bytes(content)
    with refused(ImageReadError, reason) as caught:
        read(tmp_path / "image")
    assert "0x" not in str(caught.value), "the address of an object is of no use"
    assert files_with(tmp_path, ["gone"], [0], ["ant"], Pixels(3)).kinds(0) == [], "-check reports it and continues"


@pytest.mark.parametrize("mode", ["F", "I"])
def test_floats_and_32_bit_integers_are_not_read_as_8_bits(tmp_path, mode):
    Image.new(mode, (4, 4)).save(tmp_path / "image.tif")
    with refused(ImageReadError, f"mode {mode}", "DATA.PIXELS=native"):
        read(tmp_path / "image.tif")


@pytest.mark.parametrize("between", [b"\xff", b"\xff\xff\xff", b"\0\0", b"x\xff\0x", b"\xff\xd0"])
def test_orientation_is_read_after_bytes_between_segments_as_pillow_does(tmp_path, between):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    noise(8, 6).save(tmp_path / "plain.jpg", exif=exif)
    content = (tmp_path / "plain.jpg").read_bytes()
    upright = read(tmp_path / "plain.jpg", applies_exif=True)
    assert upright.shape == (8, 6, 3)
    place = content.index(b"\xff\xe1")
    assert place > 2, "the segment of the EXIF data must not be the first, which has to follow the start at once"
    changed = tmp_path / "changed.jpg"
    changed.write_bytes(content[:place] + between + content[place:])
    with Image.open(changed) as image:
        assert image.getexif()[ExifTags.Base.Orientation] == 6
    np.testing.assert_array_equal(read(changed, applies_exif=True), upright)


def test_damaged_exif_leaves_pixels_unchanged(tmp_path):
    for name, exif in (("whole.jpg", b""), ("damaged.jpg", b"Exif\0\0no EXIF data")):
        noise(8, 6).save(tmp_path / name, exif=exif)
    whole, damaged = (read(tmp_path / name, applies_exif=True) for name in ("whole.jpg", "damaged.jpg"))
    assert np.array_equal(whole, damaged)


def test_file_too_large_for_its_pixels_is_refused(tmp_path):
    (tmp_path / "image").write_bytes(png(3) + bytes(2**20))
    assert read(tmp_path / "image", max_pixels=100).shape == (5, 6, 3)
    (tmp_path / "image").write_bytes(png(3) + bytes(2**20 + 800))
    with refused(ImageReadError, "DATA.MAX_PIXELS", "1,049,451 bytes", "1,049,376 bytes"):
        read(tmp_path / "image", max_pixels=100)
