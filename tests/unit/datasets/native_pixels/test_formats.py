"""Readers of each file format with DATA.PIXELS native, compared with the numbers that the tests wrote."""

import io
import itertools
import pickle
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import DeflatedExplicitVRLittleEndian, ImplicitVRLittleEndian, JPEGBaseline8Bit, RLELossless

from datasets import open_data
from datasets.pixels import Pixels
from datasets.pixels.native.pixels import NativePixels
from datasets.pixels.rules import ImageReadError
from tests.support.forks import ROOT
from tests.support.image_sets import noise
from tests.support.native_files import by_pillow, deep, dicom, npy, png16, tiff, tiff_of_pages
from tests.support.native_images import draw, files, settings
from tests.support.pages import block_of
from tests.support.refusals import refused
from tests.support.weight_files import Payload
from utils.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore")  # pydicom and Pillow warn about unusual and damaged files
HEIGHT, WIDTH = 5, 7
GREY, COLOURS, BANDS = deep(HEIGHT, WIDTH), deep(HEIGHT, WIDTH, 3), deep(HEIGHT, WIDTH, 5)
LAYERS = np.ascontiguousarray(np.moveaxis(BANDS, 2, 0))  # [5, H, W]
HIGHEST = 2**16 - 1
ORIENTATION = 274  # the tag of EXIF and TIFF
SMALL_COPY = np.zeros((2, 3, 3), np.uint8)


def native(data: bytes, channels: int = 1, **rules) -> np.ndarray:
    return NativePixels(channels, **rules).decode(data)


def pnm(kind: str, values: np.ndarray, highest: int = HIGHEST, comment: str = "") -> bytes:
    """Return a PGM (P5) or a PPM (P6)."""
    height, width = values.shape[:2]
    content = values.astype(">u2" if highest > 255 else np.uint8).tobytes()
    return f"{kind}\n{comment}{width} {height}\n{highest}\n".encode() + content


def assert_pixels(pixels: np.ndarray, expected: np.ndarray) -> None:
    """Assert that pixels [H, W, C] have the values and the type of an array [H, W] or [H, W, C]."""
    assert pixels.dtype == expected.dtype and pixels.dtype.isnative and pixels.flags.c_contiguous
    assert np.array_equal(pixels, expected.reshape(*expected.shape[:2], -1))


# --- the values that were written, in every format ---


GREY_FILES = {
    "PNG": png16(GREY),
    "PNG by Pillow": by_pillow(GREY, "PNG"),
    "PGM": by_pillow(GREY, "PPM"),
    "PGM with a comment": pnm("P5", GREY, comment="# from a microscope\n"),
    "TIFF": tiff(GREY),
    "TIFF by Pillow": by_pillow(GREY, "TIFF"),
    "TIFF, big-endian": tiff(GREY, byteorder=">"),
    "TIFF of tiles": tiff(GREY, tile=(16, 16)),
    "TIFF of strips": tiff(GREY, rowsperstrip=2),
    "TIFF, deflate": tiff(GREY, compression="zlib"),
    "TIFF, deflate with predictor": tiff(GREY, compression="zlib", predictor=True),
    "TIFF, LZW": tiff(GREY, compression="lzw"),
    "TIFF, LZW with predictor, big-endian": tiff(GREY, compression="lzw", predictor=True, byteorder=">"),
    "TIFF of tiles, zstd": tiff(GREY, compression="zstd", tile=(16, 16)),
    "BigTIFF": tiff(GREY, bigtiff=True),
    "BigTIFF, big-endian": tiff(GREY, bigtiff=True, byteorder=">"),
    "TIFF where 0 is white": tiff(HIGHEST - GREY, photometric="miniswhite"),
    "TIFF with a smaller copy": tiff_of_pages(GREY, {"data": SMALL_COPY, "photometric": "rgb", "subfiletype": 1}),
    "npy": npy(GREY),
    "npy in Fortran order": npy(np.asfortranarray(GREY)),
    "npy, big-endian": npy(GREY.astype(">u2")),
    "npy [H, W, 1]": npy(GREY[:, :, None]),
}
COLOUR_FILES = {
    "PNG": png16(COLOURS),
    "PPM": pnm("P6", COLOURS),
    "TIFF": tiff(COLOURS, photometric="rgb"),
    "TIFF, planar": tiff(np.moveaxis(COLOURS, 2, 0), photometric="rgb", planarconfig="separate"),
    "TIFF of three grey pages": tiff_of_pages(*np.moveaxis(COLOURS, 2, 0)),
    "npy": npy(COLOURS),
    "npy in Fortran order": npy(np.asfortranarray(COLOURS)),
}
BAND_FILES = {
    "TIFF": tiff(BANDS, planarconfig="contig"),
    "TIFF of tiles, deflate": tiff(BANDS, planarconfig="contig", tile=(16, 16), compression="zlib"),
    "TIFF, planar": tiff(LAYERS, planarconfig="separate"),
    "TIFF, planar, big-endian": tiff(LAYERS, planarconfig="separate", byteorder=">"),
    "TIFF of pages": tiff(LAYERS),
    "TIFF of single pages": tiff_of_pages(*LAYERS),
    "BigTIFF of single pages, LZW": tiff_of_pages(*LAYERS, compression="lzw"),
    "ImageJ": tiff(LAYERS, imagej=True, metadata={"axes": "CYX"}),
    "OME": tiff(LAYERS, ome=True, metadata={"axes": "CYX"}),
    "npy": npy(BANDS),
}


SIGNED = GREY.astype(np.int32) - 30_000
FLOATS = {
    "TIFF float32": (tiff(GREY.astype(np.float32)), GREY),
    "TIFF float32 with predictor": (tiff(GREY.astype(np.float32), compression="zlib", predictor=True), GREY),
    "TIFF float64": (tiff(GREY / 7), GREY / 7),
    "TIFF float16": (tiff((GREY / 32).astype(np.float16)), (GREY / 32).astype(np.float16)),
    "TIFF int8": (tiff((SIGNED >> 8).astype(np.int8)), (SIGNED >> 8).astype(np.int8)),
    "TIFF int16": (tiff(SIGNED.clip(-(2**15), 2**15 - 1).astype(np.int16)), SIGNED.clip(-(2**15), 2**15 - 1)),
    "TIFF uint32": (tiff(GREY.astype(np.uint32) + 2**16), GREY.astype(np.uint32) + 2**16),
    "npy float32": (npy(GREY.astype(np.float32)), GREY),
    "npy float64": (npy(GREY / 7), GREY / 7),
    "npy float64, big-endian": (npy((GREY / 7).astype(">f8")), GREY / 7),
    "npy int16": (npy((GREY // 2).astype(np.int16)), GREY // 2),
    "npy int32": (npy(SIGNED), SIGNED),
    "npy uint64": (npy(GREY.astype(np.uint64)), GREY),
}
OF_12_BITS = deep(HEIGHT, WIDTH, most=4096)
OF_4_BITS = (BANDS >> 12).astype(np.uint8)
INTEGERS = {
    "PGM of 12 bits": (pnm("P5", OF_12_BITS, highest=4095), OF_12_BITS),
    "PGM of 4 bits": (pnm("P5", OF_4_BITS[:, :, :1], highest=15), OF_4_BITS[:, :, :1]),
    "PPM of 4 bits": (pnm("P6", OF_4_BITS[:, :, :3], highest=15), OF_4_BITS[:, :, :3]),
    "npy of bool": (npy(GREY > 30_000), (GREY > 30_000).astype(np.uint8)),
    "TIFF of 2 bits": (tiff((GREY >> 14).astype(np.uint8), bitspersample=2), (GREY >> 14).astype(np.uint8)),
    "TIFF of 4 bits": (tiff((GREY >> 12).astype(np.uint8), bitspersample=4), (GREY >> 12).astype(np.uint8)),
    "TIFF of 12 bits where 0 is white": (
        tiff(OF_12_BITS, photometric="miniswhite", bitspersample=12),
        4095 - OF_12_BITS,
    ),
    "TIFF of bits where 0 is white": (
        tiff(LAYERS[:2] > 30_000, photometric="miniswhite"),
        (BANDS[:, :, :2] <= 30_000).astype(np.uint8),
    ),
    "TIFF of three grey pages": (
        tiff_of_pages(*(LAYERS[:3] >> 8).astype(np.uint8)),
        (BANDS[:, :, :3] >> 8).astype(np.uint8),
    ),
}


@pytest.mark.parametrize("data", [npy(GREY / 65_535), png16(GREY), tiff(GREY), by_pillow(GREY >> 8, "PNG")])
def test_files_that_name_no_window_are_refused_with_pixels_window(data):
    with refused(ImageReadError, "DATA.PIXELS=window", "DICOM"):
        native(data, kind="window")


# --- files of 8 bits ---


SHALLOW = {
    "JPEG": ["RGB", "L", "CMYK"],
    "PNG": ["RGB", "L", "P", "1", "RGBA", "LA"],
    "TIFF": ["RGB", "L", "P", "1", "RGBA"],
    "GIF": ["P"],
    "BMP": ["RGB"],
    "PPM": ["RGB", "L"],
}


def shallow(form: str, mode: str) -> bytes:
    """Return a file of 8 bits. If it is transparent, the opacity differs from pixel to pixel."""
    image = noise(9, 8)
    if mode.endswith("A"):
        image.putalpha(noise(8, 9, "L").transpose(Image.Transpose.ROTATE_90))
    return by_pillow(np.asarray(image), form, mode)


@pytest.mark.parametrize(("form", "mode"), [(form, mode) for form in SHALLOW for mode in SHALLOW[form]])
@pytest.mark.parametrize("channels", [1, 3])
def test_files_of_8_bits_have_the_pixels_of_8bit_runs(form, mode, channels):
    data = shallow(form, mode)
    assert_pixels(native(data, channels), Pixels(channels).decode(data))


@pytest.mark.parametrize("depth", [np.uint8, np.uint16])
@pytest.mark.parametrize("colours", [1, 3])
def test_channel_without_a_meaning_counts_at_every_depth(depth, colours):
    values = BANDS[:, :, : colours + 1].astype(depth)
    options = {"planarconfig": "contig", "extrasamples": ["unspecified"]}
    data = tiff(values, photometric="rgb" if colours == 3 else "minisblack", **options)
    assert_pixels(native(data, colours + 1), values)
    with refused(ImageReadError, f"{colours + 1} channels", "DATA.IMAGE_CHANNELS", colours):
        native(data, colours)


# --- opacity ---


def opaque(values: np.ndarray) -> np.ndarray:
    """Return colours over a grey of 128 / 255, computed with exact fractions of the highest value."""
    highest = np.iinfo(values.dtype).max
    grey = round(highest * 128 / 255)
    alpha = values[:, :, -1:].astype(np.float64) / highest
    return np.rint(values[:, :, :-1] * alpha + grey * (1 - alpha)).astype(values.dtype)


def transparent(channels: int, kind: type = np.uint16) -> np.ndarray:
    """Return random colours and, as the last channel, opacity. The first pixel is transparent, the second opaque."""
    values = (deep(HEIGHT, WIDTH, channels) >> (16 - 8 * kind().itemsize)).astype(kind)
    values[0, :2, -1] = 0, np.iinfo(kind).max
    return values


OPACITY = {
    "PNG 16": lambda channels: png16(transparent(channels)),
    "PNG 8": lambda channels: by_pillow(transparent(channels, np.uint8), "PNG"),
    "TIFF 16": lambda channels: tiff_with_opacity(transparent(channels)),
    "TIFF 8": lambda channels: tiff_with_opacity(transparent(channels, np.uint8)),
}


def tiff_with_opacity(values: np.ndarray, kind: str = "unassalpha") -> bytes:
    options = {"planarconfig": "contig", "extrasamples": [kind]}
    return tiff(values, photometric="rgb" if values.shape[2] == 4 else "minisblack", **options)


@pytest.mark.parametrize("kind", ["PNG 16", "TIFF 16"])
@pytest.mark.parametrize("colours", [1, 3])
def test_transparent_pixels_of_16_bits_show_grey(kind, colours):
    pixels = native(OPACITY[kind](colours + 1), colours)
    assert_pixels(pixels, opaque(transparent(colours + 1)))
    assert pixels[0, 0].tolist() == [32_896] * colours
    assert pixels[0, 1].tolist() == transparent(colours + 1)[0, 1, :-1].tolist()


@pytest.mark.parametrize("kind", OPACITY)
@pytest.mark.parametrize("channels", [2, 4])
def test_opacity_that_image_channels_counts_is_a_channel(kind, channels):
    assert_pixels(
        native(OPACITY[kind](channels), channels), transparent(channels, np.uint16 if "16" in kind else np.uint8)
    )


def test_tiff_whose_colours_include_opacity_shows_grey_once():
    values = np.array([[[40_000, 0, 10_000, 50_000], [0, 0, 0, 0], [9, 8, 7, HIGHEST]]], np.uint16)
    behind = 32_896 * (1 - values[:, :, 3:] / HIGHEST)
    expected = np.rint(values[:, :, :3] + behind).astype(np.uint16)
    assert_pixels(native(tiff_with_opacity(values, "assocalpha"), 3), expected)


# --- orientation ---


NUMBERED = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH)
SPREAD = NUMBERED.astype(np.uint16) * 1_000


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[ORIENTATION] = orientation
    return found


def turned_tiff(values: np.ndarray, orientation: int) -> bytes:
    return tiff(values, extratags=[(ORIENTATION, "H", 1, orientation, True)], planarconfig="contig")


def turned_png16(values: np.ndarray, orientation: int) -> bytes:
    """Return a PNG of 16 bits with EXIF data after its header. Pillow writes only grey ones."""
    data, end_of_header = png16(values), 33
    content = exif(orientation).tobytes().removeprefix(b"Exif\0\0")
    return data[:end_of_header] + chunk(b"eXIf", content) + data[end_of_header:]


def chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def several(channels: int) -> np.ndarray:
    """Return the numbers of the pixels in each channel, with a different number added to each."""
    return np.stack([SPREAD + number for number in range(channels)], 2)


TURNED = {
    "PNG 8": (lambda orientation: by_pillow(NUMBERED, "PNG", exif=exif(orientation)), NUMBERED),
    "PNG 16": (lambda orientation: by_pillow(SPREAD, "PNG", exif=exif(orientation)), SPREAD),
    "TIFF 8": (lambda orientation: turned_tiff(NUMBERED, orientation), NUMBERED),
    "TIFF 16": (lambda orientation: turned_tiff(SPREAD, orientation), SPREAD),
    "PNG 16 of grey and opacity": (lambda orientation: turned_png16(several(2), orientation), several(2)),
    "PNG 16 of colours": (lambda orientation: turned_png16(several(3), orientation), several(3)),
    "TIFF of five channels": (lambda orientation: turned_tiff(several(5), orientation), several(5)),
}


@pytest.mark.parametrize("kind", TURNED)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_turns_pixels_only_if_exif_applies(kind, orientation):
    write, values = TURNED[kind]
    with Image.open(io.BytesIO(by_pillow(NUMBERED, "PNG", exif=exif(orientation)))) as image:
        places = np.asarray(ImageOps.exif_transpose(image))
    channels = values.shape[2] if values.ndim == 3 else 1
    upright = values.reshape(HEIGHT * WIDTH, channels)[places]
    assert_pixels(native(write(orientation), channels, applies_exif=True), upright)
    assert_pixels(native(write(orientation), channels, applies_exif=False), values)


# --- TIFF ---


def test_ome_tiff_whose_channels_are_in_other_files_is_refused():
    files = "".join(
        f'<TiffData FirstC="{number}" IFD="0" PlaneCount="1"><UUID FileName="{name}">urn:uuid:{name}</UUID></TiffData>'
        for number, name in enumerate(["here.ome.tif", "there.ome.tif"])
    )
    sizes = " ".join(f'Size{axis}="{size}"' for axis, size in zip("XYCZT", (WIDTH, HEIGHT, 2, 1, 1), strict=True))
    text = (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
        'UUID="urn:uuid:here.ome.tif">'
        f'<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" {sizes} Type="uint16">'
        f'<Channel ID="C:0" SamplesPerPixel="1"/><Channel ID="C:1" SamplesPerPixel="1"/>{files}</Pixels></Image></OME>'
    )
    data = tiff(GREY, description=text, metadata=None)
    assert_pixels(native(data), GREY)
    with refused(ImageReadError, "1 channel", "DATA.IMAGE_CHANNELS", 2):
        native(data, 2)


REFUSED_TIFFS = {
    "pages of different sizes": (tiff_of_pages(GREY, GREY[1:]), 2, ["pages", "size"]),
    "pages of different types": (tiff_of_pages(GREY, GREY.astype(np.float32)), 2, ["pages", "type"]),
    "palette": (
        tiff_of_pages(*(LAYERS[:2] >> 8).astype(np.uint8), photometric="palette", colormap=deep(3, 256)),
        2,
        ["palette"],
    ),
    "not an image": (tiff(deep(3, 4, 5, 6, 7)), 1, ["channels", "DATA.IMAGE_CHANNELS"]),
}


# --- DICOM ---


OF_SIGNED = OF_12_BITS.astype(np.int16) - 2048
SCALE = {"RescaleSlope": 0.5, "RescaleIntercept": -1024}
BITS = {"BitsStored": 12}
INVERTED = {"PhotometricInterpretation": "MONOCHROME1"}


def table(entries: np.ndarray, bits: int, first: int = 0, kind: type = np.uint16, count: int = 0) -> Dataset:
    """Return a lookup table of DICOM for values from `first`, whose entries are stored as `kind`.

    `count`: how many entries it claims to have.
    """
    item = Dataset()
    item.LUTDescriptor, item.ModalityLUTType = [count or len(entries), first, bits], "US"
    item["LUTDescriptor"].VR = "SS" if first < 0 else "US"
    item.LUTData = entries.astype(kind).tobytes()
    item["LUTData"].VR = "OW"
    return item


TABLE = table(np.arange(4096) * 16, 16)  # values from 0 to 65520
VALUES_OF_DICOM = {
    "explicit": (dicom(GREY), GREY),
    "implicit": (dicom(GREY, ImplicitVRLittleEndian), GREY),
    "signed": (dicom(OF_SIGNED, **BITS), OF_SIGNED),
    "slope and intercept": (dicom(OF_SIGNED, **BITS, **SCALE), OF_SIGNED / 2 - 1024),
    "negative slope": (dicom(OF_12_BITS, **BITS, RescaleSlope=-2, RescaleIntercept=5), 5 - 2.0 * OF_12_BITS),
    "slope alone": (dicom(OF_12_BITS, **BITS, RescaleSlope=3), OF_12_BITS * 3.0),
    "intercept alone": (dicom(OF_12_BITS, **BITS, RescaleIntercept=-9), OF_12_BITS - 9.0),
    "table": (dicom(OF_12_BITS, **BITS, ModalityLUTSequence=[TABLE]), OF_12_BITS * 16.0),
    "table for signed values": (
        dicom(OF_SIGNED, **BITS, ModalityLUTSequence=[table(np.arange(4095) * 16, 16, first=-2047)]),
        (OF_SIGNED + 2047).clip(0) * 16.0,
    ),
    "0 is white": (dicom(OF_12_BITS, **BITS, **INVERTED), 4095.0 - OF_12_BITS),
    "0 is white, signed": (dicom(OF_SIGNED, **BITS, **INVERTED), -1.0 - OF_SIGNED),
    "0 is white, scaled": (dicom(OF_SIGNED, **BITS, **SCALE, **INVERTED), (-1.0 - OF_SIGNED) / 2 - 1024),
    "0 is white, table": (
        dicom(OF_12_BITS, **BITS, **INVERTED, ModalityLUTSequence=[TABLE]),
        65_535 - OF_12_BITS * 16.0,
    ),
    "window that native ignores": (dicom(OF_12_BITS, **BITS, WindowCenter=9, WindowWidth=4), OF_12_BITS),
    "compressed": (dicom(OF_12_BITS, RLELossless, **BITS), OF_12_BITS),
}


OF_8_BITS = (COLOURS >> 8).astype(np.uint8)
PLANES = np.ascontiguousarray(np.moveaxis(OF_8_BITS, 2, 0)).tobytes()
DICOM_OF_COLOURS = [dicom(OF_8_BITS), dicom(OF_8_BITS, PlanarConfiguration=1, PixelData=PLANES)]
SAME = ((GREY_FILES, GREY), (COLOUR_FILES, COLOURS), (BAND_FILES, BANDS))
WRITTEN = {
    **{f"{kind}, {values.shape}": (data, values) for files, values in SAME for kind, data in files.items()},
    **INTEGERS,
    **{kind: (data, values.astype(np.float32)) for kind, (data, values) in FLOATS.items()},
    **{f"DICOM, {kind}": (data, values.astype(np.float32)) for kind, (data, values) in VALUES_OF_DICOM.items()},
    **{f"DICOM of colours {n}": (data, OF_8_BITS.astype(np.float32)) for n, data in enumerate(DICOM_OF_COLOURS)},
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_file_of_each_format_has_the_values_that_were_written(kind):
    """Floats, signed and long integers, and all of DICOM become float32."""
    data, values = WRITTEN[kind]
    assert_pixels(native(data, values.shape[2] if values.ndim == 3 else 1), values)


def windowed(values: np.ndarray, center: float, width: float) -> np.ndarray:
    """Return the values after the linear window of the DICOM standard (PS3.3 C.11.2.1.2.1), from 0 to 1."""
    return np.clip((values - (center - 0.5)) / (width - 1) + 0.5, 0, 1)


WINDOW = {"WindowCenter": 300, "WindowWidth": 1200}
NEGATIVE = {"RescaleSlope": -1, "RescaleIntercept": 900}
STEPS = np.arange(4096) // 16  # from 0 to 255
WINDOWS = {
    "unsigned": (dicom(OF_12_BITS, **BITS, **WINDOW), windowed(OF_12_BITS, 300, 1200)),
    "signed": (dicom(OF_SIGNED, **BITS, **WINDOW), windowed(OF_SIGNED, 300, 1200)),
    "scaled": (
        dicom(OF_SIGNED, **BITS, **SCALE, WindowCenter=-900, WindowWidth=400),
        windowed(OF_SIGNED / 2 - 1024, -900, 400),
    ),
    "0 is white": (dicom(OF_12_BITS, **BITS, **WINDOW, **INVERTED), 1 - windowed(OF_12_BITS, 300, 1200)),
    "first of two": (
        dicom(OF_12_BITS, **BITS, WindowCenter=[300, 9], WindowWidth=[1200, 4]),
        windowed(OF_12_BITS, 300, 1200),
    ),
    "exact": (
        dicom(OF_12_BITS, **BITS, **WINDOW, VOILUTFunction="LINEAR_EXACT"),
        np.clip((OF_12_BITS - 300.0) / 1200 + 0.5, 0, 1),
    ),
    "sigmoid": (
        dicom(OF_12_BITS, **BITS, **WINDOW, VOILUTFunction="SIGMOID"),
        1 / (1 + np.exp(-4 * (OF_12_BITS - 300.0) / 1200)),
    ),
    "table of the window": (
        dicom(OF_12_BITS, **BITS, VOILUTSequence=[table(np.arange(4096) // 4, 10)]),
        (OF_12_BITS // 4) / 1023,
    ),
    "table of 8 bits": (dicom(OF_12_BITS, **BITS, VOILUTSequence=[table(STEPS, 8)]), (OF_12_BITS // 16) / 255),
    "table of 8 bits in pairs": (
        dicom(OF_12_BITS, **BITS, VOILUTSequence=[table(STEPS, 8, kind=np.uint8)]),
        (OF_12_BITS // 16) / 255,
    ),
    "table for the middle": (
        dicom(OF_12_BITS, **BITS, VOILUTSequence=[table(np.arange(256), 8, first=1000)]),
        (OF_12_BITS.astype(int) - 1000).clip(0, 255) / 255,
    ),
    "table for values below 0": (
        dicom(OF_SIGNED, **BITS, **SCALE, VOILUTSequence=[table(np.arange(2048) // 8, 8, first=-2048)]),
        (np.floor(OF_SIGNED / 2 + 1024) // 8) / 255,
    ),
    "negative slope, 0 is white": (
        dicom(OF_12_BITS, **BITS, **NEGATIVE, **WINDOW, **INVERTED),
        1 - windowed(900.0 - OF_12_BITS, 300, 1200),
    ),
    "no window, negative slope": (dicom(OF_12_BITS, **BITS, **NEGATIVE), (4095 - OF_12_BITS) / 4095),
    "empty table of the window": (
        dicom(OF_12_BITS, **BITS, **WINDOW, VOILUTSequence=[]),
        windowed(OF_12_BITS, 300, 1200),
    ),
    "table of values": (
        dicom(OF_12_BITS, **BITS, ModalityLUTSequence=[TABLE], WindowCenter=32_768, WindowWidth=65_536),
        OF_12_BITS * 16 / 65_535,
    ),
    "no window": (dicom(OF_12_BITS, **BITS), OF_12_BITS / 4095),
    "no window, signed": (dicom(OF_SIGNED, **BITS, **SCALE), (OF_SIGNED + 2048) / 4095),
    "no window, table of values": (dicom(OF_12_BITS, **BITS, ModalityLUTSequence=[TABLE]), OF_12_BITS * 16 / 65_535),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_dicom_window_gives_values_from_0_to_1(kind):
    data, values = WINDOWS[kind]
    pixels = native(data, kind="window")
    assert pixels.dtype == np.float32 and pixels.min() >= 0 and pixels.max() <= 1
    assert pixels[:, :, 0] == pytest.approx(values, abs=1e-5)


def late_deflated() -> bytes:
    """Return a deflated DICOM file that names its transfer syntax after 2,000 bytes."""
    data = dicom(GREY, DeflatedExplicitVRLittleEndian)
    place, added = data.index(b"\x02\0\x02\0UI"), 2_000
    element = b"\x02\0\x01\0OB\0\0" + struct.pack("<I", added) + bytes(added)
    length = struct.unpack_from("<I", data, 140)[0]
    start = data.index(b"\x02\0\x01\0OB\0\0")  # the version, which `element` replaces
    length += len(element) - (place - start)
    return data[:140] + struct.pack("<I", length) + data[144:start] + element + data[place:]


REFUSED_DICOM = {
    "no pixels": (dicom(None), 1, ["pixels"]),
    "several frames": (dicom(np.stack([GREY, GREY], 2), NumberOfFrames=2, SamplesPerPixel=1), 1, ["2 frames"]),
    "deflated": (dicom(GREY, DeflatedExplicitVRLittleEndian), 1, ["deflated"]),
    "deflated, said late": (late_deflated(), 1, ["deflated"]),
    "palette": (dicom(GREY, PhotometricInterpretation="PALETTE COLOR"), 1, ["palette"]),
    "half of a table": (
        dicom(OF_12_BITS, ModalityLUTSequence=[table(np.arange(2048), 16, count=4096)]),
        1,
        ["2048", "4096"],
    ),
    "colours": (DICOM_OF_COLOURS[0], 1, ["3 channels", "DATA.IMAGE_CHANNELS", 1]),
}


# --- refusals ---


@pytest.mark.parametrize(("files", "values"), SAME, ids=["grey", "colours", "bands"])
def test_other_number_of_channels_is_refused_by_both_numbers(files, values):
    count = values.shape[2] if values.ndim == 3 else 1
    for kind, channels in itertools.product(files, {1, 3, 4, 5} - {count}):
        has = "1 channel" if count == 1 else f"{count} channels"
        with refused(ImageReadError, has, "DATA.IMAGE_CHANNELS", channels):
            native(files[kind], channels)


@pytest.mark.parametrize("data", [png16(GREY), tiff(GREY), npy(GREY), npy(GREY.astype(">u2"))])
def test_another_type_than_the_images_have_is_refused(data):
    assert_pixels(native(data, kind="uint16"), GREY)
    for kind in ("uint8", "float32"):
        with refused(ImageReadError, "uint16", kind):
            native(data, kind=kind)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("write", [npy, tiff])
def test_values_that_are_not_finite_float32_are_refused(value, write):
    values = GREY / 7
    values[2, 3] = value
    with refused(ImageReadError, "finite"):
        native(write(values))


ARRAYS = {
    "one axis": (np.zeros(9, np.uint16), "9"),
    "four axes": (np.zeros((2, 3, 4, 5), np.uint16), "2, 3, 4, 5"),
    "a number": (np.zeros((), np.uint16), "uint16"),
    "empty": (np.zeros((0, 7), np.uint16), "0, 7"),
    "no channels": (np.zeros((5, 7, 0), np.uint16), "5, 7, 0"),
    "complex": (np.zeros((5, 7), np.complex64), "complex64"),
    "text": (np.full((5, 7), "1"), "5, 7"),
    "records": (np.zeros((5, 7), [("red", "u1")]), "red"),
    "dates": (np.zeros((5, 7), "datetime64[s]"), "5, 7"),
}


TEXTS = [("P2", 1, 15), ("P2", 1, 65_535), ("P3", 3, 15), ("P3", 3, 65_535)]  # whose values Pillow would scale
REFUSED = {
    **{f"TIFF, {kind}": row for kind, row in REFUSED_TIFFS.items()},
    **{f"DICOM, {kind}": row for kind, row in REFUSED_DICOM.items()},
    **{f"array, {kind}": (npy(array), 1, [shown]) for kind, (array, shown) in ARRAYS.items()},
    **{f"text, {kind}, {most}": (f"{kind} 1 1 {most} 3 4 15".encode(), n, ["text", most]) for kind, n, most in TEXTS},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsuitable_file_is_refused_with_the_reason(kind):
    data, channels, words = REFUSED[kind]
    with refused(ImageReadError, *words):
        native(data, channels)


def test_array_of_python_objects_is_refused_without_running_code(tmp_path):
    stolen = tmp_path / "stolen"
    content = npy(np.array([[Payload(Path.touch, stolen)]], dtype=object))
    np.load(io.BytesIO(content), allow_pickle=True)
    assert stolen.exists(), "the payload works"
    stolen.unlink()
    for data in (
        content,
        pickle.dumps(Payload(Path.touch, stolen)),
        content[:6] + b"\1\0" + pickle.dumps(Payload(Path.touch, stolen)),
    ):
        for rules in (NativePixels(1), Pixels(1)):
            with pytest.raises(ImageReadError):
                rules.decode(data)
    assert not stolen.exists()


# --- DATA.MAX_PIXELS ---


LARGE = np.zeros((20, 30), np.uint16)  # 600 pixels
LARGE_FILES = {
    "PNG": png16(LARGE),
    "PNG with opacity": png16(np.stack([LARGE] * 2, 2)),
    "TIFF": tiff(LARGE),
    "TIFF of single pages": tiff_of_pages(LARGE),
    "DICOM": dicom(LARGE),
    "PGM": by_pillow(LARGE, "PPM"),
    "npy": npy(LARGE),
}
DECODERS = (
    "PIL.ImageFile.ImageFile.load",
    "torchvision.io.decode_image",
    "tifffile.TiffPageSeries.asarray",
    "pydicom.dataset.Dataset.pixel_array",
)


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Make all decoders fail, and return a list that gets the name of each that is called."""
    calls = []

    def forbid(decoder: str) -> None:
        def fail(*args, **options):
            calls.append(decoder)
            raise AssertionError(f"{decoder} was called")

        monkeypatch.setattr(decoder, property(fail) if decoder.endswith("pixel_array") else fail)

    for each in DECODERS:
        forbid(each)
    return calls


# {kind: (file, channels, a limit that allows it, a lower one, what the refusal says of it)}
LIMITS = {kind: (data, 1, 600, 599, ["30 x 20"]) for kind, data in LARGE_FILES.items()}
LIMITS |= {
    f"{kind}, 5 channels": (data, 5, 256, HEIGHT * WIDTH, ["7 x 5", "5 channels"]) for kind, data in BAND_FILES.items()
}


@pytest.mark.parametrize("kind", LIMITS)
def test_image_within_max_pixels_is_read(kind):
    data, channels, limit, *_ = LIMITS[kind]
    assert native(data, channels, max_pixels=limit).shape[2] == channels


@pytest.mark.parametrize("kind", LIMITS)
def test_large_image_is_refused_before_its_pixels_are_decoded(kind, decoded):
    data, channels, _, limit, words = LIMITS[kind]
    with refused(ImageReadError, *words, "DATA.MAX_PIXELS", limit):
        native(data, channels, max_pixels=limit)
    assert not decoded


def test_tiles_of_a_tiff_count_with_their_whole_size(decoded):
    """A tile is decompressed as a whole, even if the image is only a corner of it."""
    with refused(ImageReadError, "64 x 64", "DATA.MAX_PIXELS", 4095):
        native(tiff(GREY, tile=(64, 64), compression="zlib"), max_pixels=4095)
    assert not decoded


def test_png_cannot_hide_its_size_behind_another_chunk(decoded):
    data = png16(LARGE)
    hidden = data[:8] + chunk(b"abCd", struct.pack(">IIB", 1, 1, 16) + bytes(4)) + data[8:]
    with pytest.raises(ImageReadError):
        native(hidden, max_pixels=599)
    assert not decoded


def test_dicom_cannot_contain_a_jpeg_beyond_the_limit(monkeypatch):
    def encoded(height: int, width: int) -> bytes:
        jpeg = by_pillow(np.full((height, width), 9, np.uint8), "JPEG")
        return dicom(np.zeros((HEIGHT, WIDTH), np.uint8), JPEGBaseline8Bit, PixelData=encapsulate([jpeg]))

    assert_pixels(native(encoded(HEIGHT, WIDTH), max_pixels=100), np.full((HEIGHT, WIDTH), 9, np.float32))
    calls, load = [], ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: calls.append(self.size) or load(self))
    with pytest.raises(ImageReadError):
        native(encoded(300, 300), max_pixels=100)
    assert not calls


# --- damaged files ---


WHOLE = {
    "PNG": (png16(GREY), 1),
    "PNG of colours": (png16(COLOURS), 3),
    "PGM": (by_pillow(GREY, "PPM"), 1),
    "TIFF": (tiff(GREY), 1),
    "TIFF, deflate": (tiff(GREY, compression="zlib"), 1),
    "TIFF of tiles, LZW": (tiff(GREY, compression="lzw", tile=(16, 16)), 1),
    "TIFF of five channels": (BAND_FILES["TIFF"], 5),
    "TIFF of single pages": (BAND_FILES["TIFF of single pages"], 5),
    "BigTIFF": (tiff(GREY, bigtiff=True), 1),
    "TIFF of 8 bits": (by_pillow((GREY >> 8).astype(np.uint8), "TIFF"), 1),
    "PGM of 4 bits": (pnm("P5", GREY >> 12, 15), 1),
    "DICOM of a table": (dicom(GREY, ModalityLUTSequence=[table(np.arange(256), 8)]), 1),
    "npy": (npy(GREY), 1),
    "DICOM": (dicom(GREY), 1),
    "DICOM, compressed": (dicom(GREY, RLELossless), 1),
}
PARTS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)  # fractions of a file; some files end with bytes that no reader needs
START = 40  # the file is cut after each of its first START bytes


def rules_for(channels: int) -> list[Pixels]:
    """Return the rules of a run with native pixels, and of one with 8 bits."""
    return [NativePixels(channels, max_pixels=10_000), Pixels(1 if channels == 1 else 3, max_pixels=10_000)]


@pytest.mark.parametrize("kind", WHOLE)
def test_cut_file_raises_image_read_error_or_has_all_pixels(kind):
    data, channels = WHOLE[kind]
    for rules in rules_for(channels):
        for length in [*range(START), *(int(part * len(data)) for part in PARTS)]:
            try:
                pixels = rules.decode(data[:length])
            except ImageReadError:
                continue
            assert np.array_equal(pixels, rules.decode(data)), f"cut after {length} of {len(data)} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHOLE)
def test_file_with_wrong_bytes_raises_only_image_read_error(kind):
    data, channels = WHOLE[kind]
    rng = np.random.default_rng(len(data))
    for _ in range(100):
        damaged = bytearray(data)
        for place in rng.integers(len(data) if rng.random() < 0.5 else min(200, len(data)), size=3):
            damaged[place] = rng.integers(256)
        for rules in rules_for(channels):
            try:
                pixels = rules.decode(bytes(damaged))
            except ImageReadError:
                continue
            assert pixels.shape[2] == rules.num_channels and pixels.dtype in (np.uint8, np.uint16, np.float32)


# --- the code in docs/pixels.md ---


FILES_BY_CHANNELS = {1: GREY_FILES | {kind: FLOATS[kind][0] for kind in FLOATS}, 3: COLOUR_FILES, 5: BAND_FILES}
UNLIKE_PYDICOM = (
    "slope alone",
    "intercept alone",
    "0 is white, table",
)  # the first two break the rules of the standard
DOCUMENTED = {
    f"{kind}, {channels} channels": (data, channels)
    for channels, files in FILES_BY_CHANNELS.items()
    for kind, data in files.items()
    if "PGM" not in kind and "PPM" not in kind
} | {f"DICOM, {kind}": (data, 1) for kind, (data, _) in VALUES_OF_DICOM.items() if kind not in UNLIKE_PYDICOM}


@pytest.mark.parametrize("kind", DOCUMENTED)
def test_documented_code_reads_the_values_of_training(kind, tmp_path):
    data, channels = DOCUMENTED[kind]
    endings = {"PNG": ".png", "npy": ".npy", "DICOM": ".dcm"}
    path = tmp_path / f"x{endings.get(re.split('[ ,]', kind)[0], '.tif')}"
    path.write_bytes(data)
    names: dict = {}
    exec(block_of(ROOT / "docs/pixels.md", "def read(path)").partition("\nsession = ")[0], names)
    assert_pixels(names["read"](path), native(data, channels))


# --- missing packages ---


@pytest.mark.parametrize(
    ("package", "data", "words"),
    [
        ("tifffile", tiff(GREY), ["pip install tifffile imagecodecs"]),
        ("pydicom", dicom(GREY), ["pip install pydicom"]),
    ],
    ids=["tifffile", "pydicom"],
)
def test_missing_package_is_named_with_its_pip_command(package, data, words, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(ImageReadError, *words):
        native(data)


def test_tiff_of_8_bits_needs_no_tifffile(monkeypatch):
    monkeypatch.setitem(sys.modules, "tifffile", None)
    values = (GREY >> 8).astype(np.uint8)
    assert_pixels(native(by_pillow(values, "TIFF")), values)


def test_missing_imagecodecs_is_named_with_the_compression(monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] in ("tifffile", "imagecodecs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "imagecodecs", None)  # tifffile looks for it as it is imported
    with refused(ImageReadError, "LZW", "pip install imagecodecs"):
        native(GREY_FILES["TIFF, LZW"])
    assert_pixels(native(GREY_FILES["TIFF"]), GREY)


# --- messages of runs with 8 bits ---


ONLY_NATIVE = {
    "npy": (npy(GREY), ["NumPy"]),
    "DICOM": (dicom(GREY), ["DICOM"]),
    "TIFF of five channels": (BAND_FILES["TIFF"], ["5 channels", "16 bits"]),
    "planar TIFF of five channels": (BAND_FILES["TIFF, planar"], ["5 channels", "16 bits"]),
    "BigTIFF of five channels": (tiff(BANDS, planarconfig="contig", bigtiff=True), ["5 channels", "16 bits"]),
    "float TIFF": (tiff(GREY.astype(np.float32)), ["32 bits"]),
    "TIFF int8": (FLOATS["TIFF int8"][0], ["signed"]),
}


@pytest.mark.parametrize("kind", ONLY_NATIVE)
def test_message_of_8bit_run_points_to_NativePixels(kind):
    data, words = ONLY_NATIVE[kind]
    for channels in (1, 3):
        with refused(ImageReadError, "DATA.PIXELS=native", *words):
            Pixels(channels).decode(data)


# --- limits and pictures ---


def test_limits_that_32_bit_floats_cannot_tell_apart_are_refused():
    with refused(ConfigError, "DATA.RANGE"):
        NativePixels(1, limits=(1e8, 1e8 + 1)).ends()


def test_shown_channels_are_those_of_rgb_with_their_limits():
    limits = tuple(float(each) for number in range(5) for each in (0, 1000 * (number + 1)))
    values = np.full((2, 3, 5), 1000, np.uint16)
    assert NativePixels(5, rgb=(4, 1, 0), limits=limits).shown(values)[0, 0].tolist() == [51, 128, 255]
    assert NativePixels(5, limits=limits).shown(values)[0, 0].tolist() == [255, 128, 85]
    assert NativePixels(2, limits=limits[:4]).shown(values[:, :, :2]).shape == (2, 3, 1)


def test_shown_image_without_limits_spans_its_own_values():
    values = np.linspace(-5, 5, 10_001, dtype=np.float32).reshape(73, 137)[:, :, None]
    shown = NativePixels(1).shown(values)
    assert shown.dtype == np.uint8 and shown.min() == 0 and shown.max() == 255
    assert np.abs(shown / 255 * 9.98 - 4.99 - values.clip(-4.99, 4.99)).max() < 10 / 255


def test_shown_image_of_one_value_is_black():
    with np.errstate(all="raise"):
        assert (NativePixels(1).shown(np.full((4, 4, 1), 7, np.uint16)) == 0).all()


def test_data_of_which_no_first_image_can_be_read_is_refused(tmp_path):
    photos = draw(tmp_path / "photos")
    for path in files(photos):
        path.write_bytes(b"no image")
    with refused(DataError, files(photos)[0].name):
        open_data(settings(photos).config)
