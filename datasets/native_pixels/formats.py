"""Readers of image files that keep the type of their values: PNG, PGM, TIFF, .npy and DICOM; others have 8 bits."""

import io
import logging
import re

import numpy as np
from PIL import Image

from datasets.native_pixels.unread import NUMPY, TIFF_BITS, TIFFS, is_dicom
from datasets.transforms.decode import TURNS, decode, naming_errors, open_image
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageReadError

PNG_START, PNG_DEPTH, PNG_COLOURS = (
    b"\x89PNG\r\n\x1a\n",
    24,
    25,
)  # the first bytes, positions of bits and of the kind of colours
GREY = 0  # a kind of colours
SPACE = rb"(?:\s|#[^\n]*\n)+"
NETPBM = re.compile(
    rb"P(?P<kind>[2356])" + SPACE + rb"(?P<width>\d+)" + SPACE + rb"(?P<height>\d+)" + SPACE + rb"(?P<highest>\d+)\s"
)
DEFLATED = b"1.2.840.10008.1.2.1.99"  # DICOM files whose whole content is compressed, without a limit
MOST_VALUES = 3  # values per pixel of DATA.MAX_PIXELS, as in an image of three colours
TIFF_ORIENTATION, ALPHA = 274, (1, 2)  # tags, and values of ExtraSamples that mean opacity
PALETTE, WHITE_IS_ZERO = 3, 0  # values of a TIFF's Photometric


def decode_native(data: bytes, rules: PixelRules) -> np.ndarray:
    """Return the pixels of an image file as [H, W, C] of uint8, uint16 or float32. Raise ImageReadError."""
    with naming_errors(data, rules):
        return _checked(_read(data, rules), rules)


def _read(data: bytes, rules: PixelRules) -> np.ndarray:
    if data.startswith(NUMPY):
        return np.load(io.BytesIO(data), allow_pickle=False)  # an array of Python objects is refused, not unpickled
    if is_dicom(data):
        return _read_dicom(data, rules)
    if data.startswith(PNG_START) and data[PNG_DEPTH : PNG_DEPTH + 1] == b"\x10":
        return _read_deep_png(data, rules)
    if data.startswith(TIFFS) and not _is_plain_tiff(data, rules):
        return _read_tiff(data, rules)
    if (start := NETPBM.match(data)) and int(start["highest"]) > 255:
        return _read_netpbm(data, start, rules)
    if rules.num_channels in (2, 4):
        with open_image(data, rules) as image:
            if len(image.getbands()) == rules.num_channels and image.mode in ("LA", "RGBA"):
                return np.array(image)
    colours = 1 if rules.num_channels == 1 else 3
    return decode(data, PixelRules(colours, rules.applies_exif, rules.background, rules.max_pixels))


def _checked(pixels: np.ndarray, rules: PixelRules) -> np.ndarray:
    """Return pixels [H, W] or [H, W, C] as [H, W, C] of a supported type. Refuse other types, sizes and numbers."""
    if pixels.ndim not in (2, 3) or not pixels.size or pixels.dtype.kind not in "buif":
        raise ImageReadError(
            f"an array of {pixels.dtype} with the shape {list(pixels.shape)} is not an image [H, W] or [H, W, C]"
        )
    pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
    _refuse_large(*pixels.shape, rules)
    if pixels.dtype == bool:
        pixels = pixels.astype(np.uint8)
    elif pixels.dtype.kind != "u" or pixels.dtype.itemsize > 2 or rules.native.kind == "window":
        with np.errstate(over="ignore"):
            pixels = pixels.astype(np.float32)
    pixels = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("="))
    if pixels.shape[2] != rules.num_channels:
        has = "1 channel" if pixels.shape[2] == 1 else f"{pixels.shape[2]} channels"
        size = f"{pixels.shape[1]} x {pixels.shape[0]} pixels"
        raise ImageReadError(f"it has {has} ({size}), but DATA.IMAGE_CHANNELS is {rules.num_channels}")
    if rules.native.kind not in ("native", "window", pixels.dtype.name):
        raise ImageReadError(
            f"its values are {pixels.dtype.name}, but DATA.PIXELS is {rules.native.kind}, the type of the training images"
        )
    if pixels.dtype == np.float32 and not np.isfinite(pixels).all():
        raise ImageReadError("some of its values are not finite (NaN, infinite, or larger than a float32)")
    return pixels


def _refuse_large(height: int, width: int, channels: int, rules: PixelRules) -> None:
    if height * width * max(channels, MOST_VALUES) > MOST_VALUES * rules.max_pixels:
        raise Image.DecompressionBombError(f"{width} x {height} pixels with {channels} channels")


def _read_deep_png(data: bytes, rules: PixelRules) -> np.ndarray:
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    _refuse_large(height, width, MOST_VALUES, rules)
    if data[PNG_COLOURS] == GREY:
        with open_image(data, rules) as image:
            return np.asarray(image).astype(np.uint16)
    try:
        from imagecodecs import png_decode
    except ImportError as error:
        raise ImageReadError("a PNG with colours of 16 bits needs imagecodecs: pip install imagecodecs") from error
    pixels = png_decode(data)
    return _opaque(pixels, rules) if pixels.shape[2] in (2, 4) else pixels


def _read_netpbm(data: bytes, start: re.Match, rules: PixelRules) -> np.ndarray:
    """Return a PGM or PPM of 16 bits. Pillow would scale its values."""
    if start["kind"] in b"23":
        raise ImageReadError("a PGM or PPM of 16 bits in text; save it in binary form")
    width, height, channels = int(start["width"]), int(start["height"]), 3 if start["kind"] == b"6" else 1
    _refuse_large(height, width, channels, rules)
    values = np.frombuffer(data, ">u2", height * width * channels, start.end())
    return values.reshape(height, width, channels)


def _opaque(pixels: np.ndarray, rules: PixelRules) -> np.ndarray:
    """Return colours on a grey background, unless DATA.IMAGE_CHANNELS counts the opacity as a channel."""
    if pixels.shape[2] == rules.num_channels:
        return pixels
    highest = np.iinfo(pixels.dtype).max
    colours, opacity = pixels[:, :, :-1].astype(np.float64), pixels[:, :, -1:] / highest
    behind = round(highest * rules.background[0] / 255)
    return np.rint(colours * opacity + behind * (1 - opacity)).astype(pixels.dtype)


# --- TIFF ---


def _is_plain_tiff(data: bytes, rules: PixelRules) -> bool:
    """Return whether a TIFF has one page of 8 bits with the colours that Pillow reads."""
    if rules.num_channels not in (1, 3):
        return False
    try:
        with open_image(data, rules) as image:
            bits = image.tag_v2.get(TIFF_BITS, (1,))
            return max(bits) <= 8 and image.mode[0] not in "IF" and getattr(image, "n_frames", 1) == 1
    except (OSError, SyntaxError):
        return False


def _read_tiff(data: bytes, rules: PixelRules) -> np.ndarray:
    try:
        from tifffile import TiffFile
    except ImportError as error:
        raise ImageReadError("a TIFF of these values needs tifffile: pip install tifffile imagecodecs") from error
    logging.getLogger("tifffile").disabled = True  # it would print damage that does not harm the pixels
    with TiffFile(io.BytesIO(data)) as tiff:
        every = [each for each in tiff.series if not each.keyframe.is_reduced] or tiff.series
        series, page = every[0], every[0].keyframe
        if len({(each.shape, each.dtype, each.axes) for each in every}) > 1:
            raise ImageReadError("its pages differ in size or type, so they are not the channels of one image")
        if page.photometric == PALETTE:
            raise ImageReadError("its values are numbers of colours in a palette; save it with the colours themselves")
        sides = dict(zip(series.axes, series.shape, strict=True))
        if not {"Y", "X"} <= sides.keys():
            raise ImageReadError(
                f"its axes are {series.axes}; halfstep reads Y and X, and takes all others as channels"
            )
        places = [series.axes.index(axis) for axis in "YX"]
        num_channels = len(every) * series.size // max(sides["Y"] * sides["X"], 1)
        _refuse_large(sides["Y"], sides["X"], num_channels, rules)
        try:
            layers = [np.moveaxis(each.asarray(), places, (0, 1)) for each in every]
        except ValueError as error:
            if "imagecodecs" not in str(error):
                raise
            raise ImageReadError(f"its compression ({page.compression.name}) needs: pip install imagecodecs") from error
        pixels = np.concatenate([each.reshape(sides["Y"], sides["X"], -1) for each in layers], 2)
        if page.photometric == WHITE_IS_ZERO and pixels.dtype.kind == "u":
            pixels = (2**page.bitspersample - 1) - pixels
        if len(page.extrasamples) == 1 and page.extrasamples[0] in ALPHA and pixels.dtype.kind == "u":
            pixels = _opaque(pixels, rules)
        orientation = page.tags.valueof(TIFF_ORIENTATION, 1) if rules.applies_exif else 1
    return TURNS[orientation](pixels) if orientation in TURNS else pixels


# --- DICOM ---


def _read_dicom(data: bytes, rules: PixelRules) -> np.ndarray:
    try:
        from pydicom import dcmread
        from pydicom.pixels import apply_modality_lut, apply_voi_lut
    except ImportError as error:
        raise ImageReadError("a DICOM file needs pydicom: pip install pydicom") from error
    if DEFLATED in data[:1024]:
        raise ImageReadError("a deflated DICOM file could expand without a limit; save it with another transfer syntax")
    file = dcmread(io.BytesIO(data))
    if not any(name in file for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise ImageReadError("a DICOM file without pixels")
    if (frames := int(file.get("NumberOfFrames") or 1)) > 1:
        raise ImageReadError(f"it has {frames} frames; save each frame as a file of its own")
    if file.PhotometricInterpretation == "PALETTE COLOR":
        raise ImageReadError("its values are numbers of colours in a palette; save it with the colours themselves")
    _refuse_large(file.Rows, file.Columns, file.SamplesPerPixel, rules)
    bits, is_signed = file.get("BitsStored", 32), file.get("PixelRepresentation", 0)
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if is_signed else [0, 2**bits - 1], np.float64)
    if "ModalityLUTSequence" in file:
        pixels = apply_modality_lut(file.pixel_array, file)
    else:
        slope, intercept = float(file.get("RescaleSlope") or 1), float(file.get("RescaleIntercept") or 0)
        pixels, ends = file.pixel_array * slope + intercept, ends * slope + intercept
    if rules.native.kind == "window":
        pixels = apply_voi_lut(pixels, file)
        if "VOILUTSequence" in file:
            ends = np.array([0, 2 ** file.VOILUTSequence[0].LUTDescriptor[2] - 1])
    low, high = sorted(ends)
    pixels = np.asarray(pixels, np.float32)
    if file.PhotometricInterpretation == "MONOCHROME1":
        pixels = np.float32(low + high) - pixels
    return (pixels - np.float32(low)) / np.float32(high - low) if rules.native.kind == "window" else pixels
