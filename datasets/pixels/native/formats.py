"""Readers of image files that keep the type of their values: PNG, PGM, PPM, TIFF, .npy and DICOM."""

import io
import logging
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from datasets.pixels.decode import (
    ORIENTATION,
    decode,
    has_unknown_range,
    naming_errors,
    open_image,
    orientation_of,
    turn,
)
from datasets.pixels.native.unread import NUMPY, TIFF_BITS, TIFFS, is_dicom
from datasets.pixels.rules import ImageReadError, PixelRules
from utils.commands import pip

PNG_START, PNG_DEPTH = b"\x89PNG\r\n\x1a\n", 24  # the first bytes, and the position of the bits per value
PNG_HEADER, PNG_KIND, GREY_AND_OPACITY, EIGHT_BITS_RGBA = slice(12, 29), 25, 4, b"\x08\x06"
# PGM and PPM: width, height and highest value, with space or comments between them. Kinds 2 and 3 are text.
PNM = re.compile(rb"P[2356]" + 3 * rb"(?:\s|#[^\r\n]*[\r\n])+(\d+)" + rb"\s")
DEFLATED = b"1.2.840.10008.1.2.1.99"  # DICOM files whose whole content is compressed, without a limit
MOST_VALUES = 3  # values per pixel of DATA.MAX_PIXELS, as in an image of three colours
ALPHA = (1, 2)  # values of a TIFF's tag ExtraSamples that mean opacity; 1: the colours are multiplied by it
EXTRA_SAMPLES = 338  # the tag of a TIFF with the meaning of channels that are no colours
PALETTE, WHITE_IS_ZERO = 3, 0  # values of a TIFF's Photometric


def decode_native(data: bytes, rules: PixelRules, kind: str) -> np.ndarray:
    """Return the pixels of an image file as [H, W, C] of uint8, uint16 or float32. Raise ImageReadError.

    `kind`: DATA.PIXELS.
    """
    with naming_errors(data, rules):
        return _checked(_read(data, rules, kind), rules, kind)


def _read(data: bytes, rules: PixelRules, kind: str) -> np.ndarray:
    if is_dicom(data):
        return _read_dicom(data, rules, kind)
    if kind == "window":
        raise ImageReadError("it is not a DICOM file, so it names no window; DATA.PIXELS=window reads only DICOM files")
    if data.startswith(NUMPY):
        return np.load(io.BytesIO(data), allow_pickle=False)  # an array of Python objects is refused, not unpickled
    if data.startswith(PNG_START) and data[PNG_DEPTH : PNG_DEPTH + 1] == b"\x10":
        return _read_deep_png(data, rules)
    if data.startswith(TIFFS) and not _is_plain_tiff(data, rules):
        return _read_tiff(data, rules)
    if (header := PNM.match(data)) and 0 < int(header[3]) < 2**16 and int(header[3]) != 255:
        return _read_pnm(data, header, rules)
    return _read_shallow(data, rules)


def _checked(pixels: np.ndarray, rules: PixelRules, kind: str) -> np.ndarray:
    """Return pixels [H, W] or [H, W, C] as [H, W, C] of a supported type. Refuse other types, sizes and numbers."""
    if pixels.ndim not in (2, 3) or not pixels.size or pixels.dtype.kind not in "buif":
        raise ImageReadError(
            f"an array of {pixels.dtype} with the shape {list(pixels.shape)} is not an image [H, W] or [H, W, C]"
        )
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    _refuse_large(*pixels.shape, rules)
    if pixels.dtype.kind not in "bu" or pixels.dtype.itemsize > 2:
        with np.errstate(over="ignore"):
            pixels = pixels.astype(np.float32)
    elif pixels.dtype == bool:
        pixels = pixels.astype(np.uint8)
    pixels = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("="))
    height, width, channels = pixels.shape
    if channels != rules.num_channels:
        has = "1 channel" if channels == 1 else f"{channels} channels"
        raise ImageReadError(
            f"it has {has} ({width} x {height} pixels), but DATA.IMAGE_CHANNELS is {rules.num_channels}"
        )
    if kind not in ("native", "window", pixels.dtype.name):
        raise ImageReadError(
            f"its values are {pixels.dtype.name}, but DATA.PIXELS is {kind}, the type of the training images"
        )
    if pixels.dtype == np.float32 and not np.isfinite(pixels).all():
        raise ImageReadError("some of its values are not finite (NaN, infinite, or larger than a float32)")
    return pixels


def _refuse_large(height: int, width: int, channels: int, rules: PixelRules) -> None:
    if height * width * max(channels, MOST_VALUES) > MOST_VALUES * rules.max_pixels:
        raise Image.DecompressionBombError(f"{width} x {height} pixels with {channels} channels")


def _upright(pixels: np.ndarray, orientation: int, rules: PixelRules) -> np.ndarray:
    return turn(pixels, orientation) if rules.applies_exif else pixels


def _opaque(pixels: np.ndarray, rules: PixelRules, is_multiplied: bool = False) -> np.ndarray:
    """Return colours on a grey background, unless DATA.IMAGE_CHANNELS counts the opacity as a channel.

    `is_multiplied`: the colours are already multiplied by the opacity.
    """
    if pixels.shape[2] == rules.num_channels:
        return pixels
    highest = np.iinfo(pixels.dtype).max
    colours, opacity = pixels[:, :, :-1].astype(np.float64), pixels[:, :, -1:] / highest
    behind = round(highest * rules.background[0] / 255)
    if not is_multiplied:
        colours *= opacity
    return np.rint(colours + behind * (1 - opacity)).clip(0, highest).astype(pixels.dtype)


# --- PNG, PGM, PPM, and files of 8 bits ---


def _read_shallow(data: bytes, rules: PixelRules) -> np.ndarray:
    """Read a file of 8 bits. Opacity is a channel if DATA.IMAGE_CHANNELS counts it."""
    if rules.num_channels in (2, 4):
        with open_image(data, rules) as image:
            if image.mode == ("LA" if rules.num_channels == 2 else "RGBA"):
                return _upright(np.asarray(image), orientation_of(data, image), rules)
    colours = 1 if rules.num_channels == 1 else 3
    return decode(data, PixelRules(colours, rules.applies_exif, rules.background, rules.max_pixels))


def _read_deep_png(data: bytes, rules: PixelRules) -> np.ndarray:
    """Read a PNG of 16 bits with Pillow. torchvision would be faster, but a damaged file crashes its decoder."""
    if data[PNG_KIND] == GREY_AND_OPACITY:  # a PNG of 8 bits with four colours has the same bytes
        header = data[PNG_HEADER][:12] + EIGHT_BITS_RGBA + data[PNG_HEADER][14:]
        data = data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]
        with open_image(data, rules) as image:
            pixels = np.asarray(image).view(">u2").astype(np.uint16)
            return _opaque(_upright(pixels, orientation_of(data, image), rules), rules)
    layers = []
    for order in "BL":  # Pillow keeps 8 bits of a colour: read the upper byte of each value first, then the lower one
        with open_image(data, rules) as image:
            if image.mode.startswith("I"):
                return _upright(np.asarray(image).astype(np.uint16), orientation_of(data, image), rules)
            image.tile = [each._replace(args=f"{image.mode};16{order}") for each in image.tile]
            layers.append(np.asarray(image).astype(np.uint16))
            orientation = orientation_of(data, image)
    pixels = _upright(layers[0] * np.uint16(256) + layers[1], orientation, rules)
    return _opaque(pixels, rules) if pixels.shape[2] == 4 else pixels


def _read_pnm(data: bytes, header: re.Match, rules: PixelRules) -> np.ndarray:
    """Read a PGM or PPM whose highest value is not 255, so Pillow would scale its values."""
    if data[1:2] in b"23":
        raise ImageReadError(f"its values are text, up to {int(header[3])}; save it as a binary PGM or PPM")
    width, height, channels = int(header[1]), int(header[2]), 3 if data.startswith(b"P6") else 1
    _refuse_large(height, width, channels, rules)
    kind = ">u2" if int(header[3]) > 255 else "u1"
    return np.frombuffer(data, kind, height * width * channels, header.end()).reshape(height, width, channels)


# --- TIFF ---


def _is_plain_tiff(data: bytes, rules: PixelRules) -> bool:
    """Return whether a TIFF has one page of 8 bits, or 1 bit, and no channels other than colours and opacity."""
    if rules.num_channels not in (1, 3):
        return False
    try:
        with open_image(data, rules) as image:
            tags = image.tag_v2
            has_8_bits = max(tags.get(TIFF_BITS, (1,))) == 8 or image.mode in ("1", "P")
            is_named = image.mode != "RGBX" and tags.get(EXTRA_SAMPLES, ()) in ((), *((each,) for each in ALPHA))
            return has_8_bits and is_named and not has_unknown_range(image) and getattr(image, "n_frames", 1) == 1
    except (OSError, SyntaxError):
        return False


def _read_tiff(data: bytes, rules: PixelRules) -> np.ndarray:
    try:
        from tifffile import TiffFile
    except ImportError as error:
        raise ImageReadError(f"a TIFF of these values needs tifffile: {pip('install')} tifffile imagecodecs") from error
    logging.getLogger("tifffile").disabled = True  # it would print damage that does not harm the pixels
    with TiffFile(io.BytesIO(data), is_ome=False) as tiff:  # OME would fill channels of other files with zeros
        series = [each for each in tiff.series if not each.keyframe.is_reduced] or tiff.series
        page = series[0].keyframe
        if len({(each.shape, each.dtype, each.axes) for each in series}) > 1:
            raise ImageReadError("its pages differ in size or type, so they are not the channels of one image")
        if page.photometric == PALETTE:
            raise ImageReadError("its values are numbers of colours in a palette; save it with the colours themselves")
        pixels = np.concatenate([_pixels_of(each, len(series), rules) for each in series], 2)
        if page.photometric == WHITE_IS_ZERO and pixels.dtype.kind in "bu":
            pixels = ~pixels if pixels.dtype == bool else (2**page.bitspersample - 1) - pixels
        if len(page.extrasamples) == 1 and page.extrasamples[0] in ALPHA and pixels.dtype.kind == "u":
            pixels = _opaque(pixels, rules, page.extrasamples[0] == ALPHA[0])
        return _upright(pixels, page.tags.valueof(ORIENTATION, 1), rules)


def _pixels_of(series: Any, num_series: int, rules: PixelRules) -> np.ndarray:
    """Return the pages of a series as [H, W, C]. `num_series`: the number of series like this one in the file."""
    page, sides = series.keyframe, dict(zip(series.axes, series.shape, strict=True))
    if not {"Y", "X"} <= sides.keys():
        raise ImageReadError(f"its axes are {series.axes}; halfstep reads Y and X, and takes all others as channels")
    height, width = sides["Y"], sides["X"]
    _refuse_large(height, width, num_series * series.size // max(height * width, 1), rules)
    if page.is_tiled:  # a tile is decompressed as a whole
        _refuse_large(page.tilelength, page.tilewidth, 1, rules)
    try:
        pixels = series.asarray()
    except ValueError as error:
        if "imagecodecs" not in str(error):
            raise
        raise ImageReadError(
            f"its compression ({page.compression.name}) needs: {pip('install')} imagecodecs"
        ) from error
    return np.moveaxis(pixels, [series.axes.index(axis) for axis in "YX"], (0, 1)).reshape(height, width, -1)


# --- DICOM ---


def _read_dicom(data: bytes, rules: PixelRules, kind: str) -> np.ndarray:
    try:
        from pydicom import dcmread
    except ImportError as error:
        raise ImageReadError(f"a DICOM file needs pydicom: {pip('install')} pydicom") from error
    if DEFLATED in data:
        raise ImageReadError("a deflated DICOM file could expand without a limit; save it with another transfer syntax")
    Image.MAX_IMAGE_PIXELS = rules.max_pixels  # for JPEG files inside
    file = dcmread(io.BytesIO(data))
    if not any(name in file for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise ImageReadError("a DICOM file without pixels")
    if (frames := int(file.get("NumberOfFrames") or 1)) > 1:
        raise ImageReadError(f"it has {frames} frames; save each frame as a file of its own")
    if file.PhotometricInterpretation == "PALETTE COLOR":
        raise ImageReadError("its values are numbers of colours in a palette; save it with the colours themselves")
    _refuse_large(file.Rows, file.Columns, file.SamplesPerPixel, rules)
    pixels, low, high = _modality_values(file)
    if kind == "window":
        pixels, low, high = _windowed(pixels, low, high, file), 0, 1
    pixels = np.asarray(pixels, np.float32)
    return np.float32(low + high) - pixels if file.PhotometricInterpretation == "MONOCHROME1" else pixels


def _modality_values(file: Any) -> tuple[np.ndarray, float, float]:
    """Return the values after the modality transform, and the lowest and highest value that it can give."""
    from pydicom.pixels import apply_modality_lut

    if tables := file.get("ModalityLUTSequence"):
        values, highest = _looked_up(file.pixel_array, tables[0], file, apply_modality_lut)
        return values, 0, highest
    for name, usual in (("RescaleSlope", 1), ("RescaleIntercept", 0)):
        if not file.get(name):  # pydicom uses either only if both are there
            setattr(file, name, usual)
    bits = file.get("BitsStored", 32)
    ends = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if file.get("PixelRepresentation") else (0, 2**bits - 1)
    low, high = sorted(apply_modality_lut(np.array(ends), file).tolist())
    return apply_modality_lut(file.pixel_array, file), low, high


def _windowed(values: np.ndarray, low: float, high: float, file: Any) -> np.ndarray:
    """Return values between `low` and `high` after the file's table or window (VOI LUT), from 0 to 1."""
    from pydicom.pixels import apply_voi_lut

    if tables := file.get("VOILUTSequence"):
        entries, highest = _looked_up(values, tables[0], file, apply_voi_lut)
        return entries / highest
    if None in (file.get("WindowCenter"), file.get("WindowWidth")):
        return (values - low) / (high - low)
    # pydicom scales its result to the range that it derives from these elements.
    for name in ("ModalityLUTSequence", "RescaleSlope", "RescaleIntercept"):
        file.pop(name, None)
    file.BitsStored, file.PixelRepresentation = 1, 0
    return apply_voi_lut(values, file)


def _looked_up(
    values: np.ndarray, table: Any, file: Any, apply: Callable[[np.ndarray, Any], np.ndarray]
) -> tuple[np.ndarray, int]:
    """Return the entries of a table of the file for these values, and the highest number of its bits.

    `apply`: pydicom's function. It would count the places in a table of 8 bits with 8 bits, and knows no entries of 12
    bits or in pairs, so it gets a table of 16 bits, and only values with a place in it.
    """
    count, first, bits = table.LUTDescriptor
    count, data = count or 2**16, table.LUTData
    table.LUTDescriptor[2] = 16
    num_entries = len(data) // 2 if isinstance(data, bytes) else len(data)
    if isinstance(data, bytes) and bits == 8 and num_entries < count and file.original_encoding[1]:
        table["LUTData"].VR, num_entries = "US", len(data)
        table.LUTData = list(data[:count])
    if num_entries < count:
        raise ImageReadError(f"its table has {num_entries} entries instead of {count}")
    entries = apply(np.floor(values).astype(np.int64).clip(first, first + count - 1), file)
    if entries.max() >= 2**bits:
        raise ImageReadError(f"its table has entries up to {entries.max()}, but says that they have {bits} bits")
    return entries, 2**bits - 1
