"""From an image file's bytes to pixels: the same as Pillow's `convert`, whatever the kind of image."""

import contextlib
import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from datasets.types import ImageReadError

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow reads everything, JPEG at about half the speed
    simplejpeg = None

MODES = {1: "L", 3: "RGB"}  # Pillow's names for grey and colour, by the number of channels
# What libjpeg turns into RGB or grey itself, exactly as when Pillow calls it. CMYK is Pillow's: it knows Adobe's inversion.
IN_ONE_STEP = {3: {"YCbCr": "RGB", "RGB": "RGB", "Gray": "RGB"}, 1: {"Gray": "GRAY"}}


def decode(data: bytes, num_channels: int) -> np.ndarray:
    """uint8 [H, W, num_channels]. As Pillow does, it ignores the orientation that a camera noted."""
    try:
        pixels = _decode_jpeg(data, num_channels) if simplejpeg and data[:2] == b"\xff\xd8" else None
        return _decode_any(data, num_channels) if pixels is None else pixels
    except UnidentifiedImageError as error:  # its own words name an object in memory
        raise ImageReadError("UnidentifiedImageError: empty, or no kind of image that Pillow knows") from error
    except Exception as error:  # on a broken file Pillow raises whatever its parsing ran into
        raise ImageReadError(f"{type(error).__name__}: {error}") from error


def _decode_jpeg(data: bytes, num_channels: int) -> np.ndarray | None:
    """Nothing where Pillow has to decide: other colours, and files that are not quite right."""
    with contextlib.suppress(ValueError):
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _refuse_bomb(width, height)
        if colours in IN_ONE_STEP[num_channels]:
            return simplejpeg.decode_jpeg(data, IN_ONE_STEP[num_channels][colours])
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
    """Pillow only warns of a small file that unpacks to gigabytes, up to twice its limit."""
    if width * height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"{width} x {height} pixels, more than {Image.MAX_IMAGE_PIXELS}")
