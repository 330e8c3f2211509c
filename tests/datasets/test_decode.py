"""From the bytes of an image file to pixels."""

import io
import os

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from datasets.transforms.decode import decode
from datasets.types import ImageReadError
from tests.support.image_sets import load, make_folders, noise


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "CMYK", "I;16", "1", "L"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_any_mode_become_what_pillow_converts_them_to(tmp_path, mode, channels):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    file = tmp_path / "val" / "ant" / "00.JPEG"
    image = Image.fromarray(np.arange(42, dtype=np.uint16).reshape(6, 7) * 1500) if mode == "I;16" else noise(7, 6)
    (image if mode == "I;16" else image.convert(mode)).save(file, format="TIFF")
    wanted = {1: "L", 3: "RGB"}[channels]
    got = load("imagefolder", tmp_path, IMAGE_CHANNELS=channels)[1].read(0)
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
def test_jpegs_are_decoded_to_pillows_pixels_with_and_without_the_fast_decoder(kind, channels, monkeypatch):
    mode, options = JPEGS[kind]
    buffer = io.BytesIO()
    noise(61, 45).convert(mode).save(buffer, format="JPEG", **options)
    with Image.open(buffer) as image:
        wanted = np.array(image.convert("RGB" if channels == 3 else "L")).reshape(45, 61, channels)
    used = []
    decode_jpeg = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args: used.append(1) or decode_jpeg(*args))
    fast = decode(buffer.getvalue(), channels)
    assert bool(used) == (kind == "grey" or (channels == 3 and kind != "CMYK"))
    monkeypatch.setattr("datasets.transforms.decode.simplejpeg", None)
    assert np.array_equal(fast, wanted) and np.array_equal(decode(buffer.getvalue(), channels), wanted)


def test_exif_orientation_is_not_applied(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    noise(8, 4).save(tmp_path / "val" / "ant" / "00.JPEG", format="JPEG", exif=exif)
    assert load("imagefolder", tmp_path)[1].read(0).shape == (4, 8, 3)


def broken_file(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "bomb":
        Image.new("1", (10_000, 10_000)).save(buffer, format="PNG")  # of this size Pillow only warns
    else:
        noise(64, 64).save(buffer, format="JPEG")
    content = buffer.getvalue()
    return {"cut off": content[: len(content) // 2], "empty": b"", "text": b"<html>", "bomb": content}[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cut off", "OSError: image file is truncated"),
        ("empty", "UnidentifiedImageError"),
        ("text", "UnidentifiedImageError"),
        ("bomb", "DecompressionBombError"),
    ],
)
def test_a_broken_image_is_told_apart_from_other_errors(tmp_path, kind, reason):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    (tmp_path / "val" / "ant" / "00.JPEG").write_bytes(broken_file(kind))
    _, val = load("imagefolder", tmp_path)
    with pytest.raises(ImageReadError, match=reason):
        val.read(0)


def test_a_named_pipe_is_a_broken_image_and_no_reason_to_wait(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    os.mkfifo(tmp_path / "val" / "ant" / "pipe.jpg")
    _, val = load("imagefolder", tmp_path)
    with pytest.raises(ImageReadError, match="it is a pipe"):
        val.read(1)
