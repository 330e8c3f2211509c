"""From the bytes of an image file to pixels, the same as Pillow's `convert` gives for every kind of image."""

import contextlib
import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from datasets.types import ImageReadError

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow reads everything, JPEGs at about half the speed
    simplejpeg = None

MODES = {1: "L", 3: "RGB"}  # Pillow's modes by number of channels
# Conversions by libjpeg itself, exactly as when Pillow calls it. CMYK needs Pillow, which knows Adobe's inversion.
LIBJPEG_CONVERSIONS = {3: {"YCbCr": "RGB", "RGB": "RGB", "Gray": "RGB"}, 1: {"Gray": "GRAY"}}


def decode(data: bytes, num_channels: int) -> np.ndarray:
    """uint8 [H, W, num_channels]. Like Pillow, it ignores the EXIF orientation."""
    try:
        pixels = _decode_jpeg(data, num_channels) if simplejpeg and data[:2] == b"\xff\xd8" else None
        return _decode_any(data, num_channels) if pixels is None else pixels
    except UnidentifiedImageError as error:  # its own text names an object in memory
        raise ImageReadError("UnidentifiedImageError: empty, or not an image that Pillow knows") from error
    except Exception as error:  # Pillow's parsers raise many types on a broken file
        raise ImageReadError(f"{type(error).__name__}: {error}") from error


def _decode_jpeg(data: bytes, num_channels: int) -> np.ndarray | None:
    """None where Pillow has to decide: other colour spaces, and files with errors."""
    with contextlib.suppress(ValueError):
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _refuse_bomb(width, height)
        if colours in LIBJPEG_CONVERSIONS[num_channels]:
            return simplejpeg.decode_jpeg(data, LIBJPEG_CONVERSIONS[num_channels][colours])
    return None


def _decode_any(data: bytes, num_channels: int) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        _refuse_bomb(*image.size)
        if 0 in image.size:
            raise ValueError("it has no pixels")
        return to_array(image, num_channels)


def to_array(image: Image.Image, num_channels: int) -> np.ndarray:
    """A Pillow image as uint8 [H, W, num_channels]."""
    mode = MODES[num_channels]
    pixels = np.array(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _refuse_bomb(width: int, height: int) -> None:
    """Enforce Pillow's limit on decompressed pixels, of which up to twice the limit it only warns."""
    if width * height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"{width} x {height} pixels, more than {Image.MAX_IMAGE_PIXELS}")
