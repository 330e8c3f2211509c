"""The rules by which an image of any mode becomes uint8 pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import ExifTags, Image

from configs.schema import Data

MODES = {1: "L", 3: "RGB"}  # Pillow's modes by number of channels
GREY_16_BIT = ("PNG", "PPM")  # formats whose images have 16 bits if Pillow opens them in mode I (32-bit integers)
SHALLOW, HIGHEST_OF_SHALLOW = "16-bit files that use 12 bits or fewer, so 8 bits keep at most 16 of their levels", 2**12
KEEP_VALUES = "set DATA.PIXELS=native, which keeps the values of the files (docs/pixels.md)"
TIFF_BITS = ExifTags.Base.BitsPerSample


class ImageReadError(Exception):
    """An image cannot be read. This does not end a run; see BadImages."""


class Images(Protocol):
    """The images of an ImageSet, whose class is above this file."""

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> np.ndarray: ...
    def kinds(self, index: int) -> Sequence[str]: ...


@dataclass(frozen=True)
class PixelRules:
    """The rules by which image files become pixels. A cache of pixels is only valid for the same rules."""

    num_channels: int
    applies_exif: bool = False
    background: tuple[int, ...] = (128, 128, 128)  # the RGB colour behind transparent pixels
    max_pixels: int = Data.MAX_PIXELS

    @property
    def exif(self) -> str:
        """Return the value of DATA.EXIF for these rules."""
        return "apply" if self.applies_exif else "ignore"


def to_array(image: Image.Image, rules: PixelRules) -> np.ndarray:
    """Return a Pillow image, or its first frame, as uint8 [H, W, rules.num_channels]."""
    if has_unknown_range(image):
        raise ImageReadError(
            f"it has 32 bits per pixel or signed values (Pillow's mode {image.mode}), whose range is unknown; save it with "
            "8 or 16 bits, or set DATA.PIXELS=native (docs/pixels.md)"
        )
    if image.mode.startswith("I"):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        canvas, image = Image.new("RGB", image.size, rules.background), image.convert("RGBA")
        canvas.paste(image, mask=image)
        image = canvas
    mode = MODES[rules.num_channels]
    pixels = np.array(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def has_unknown_range(image: Image.Image) -> bool:
    """Return whether the pixels have 32 bits or signed values (only in TIFF), for which there is no standard range."""
    is_signed = 2 in getattr(image, "tag_v2", {}).get(ExifTags.Base.SampleFormat, ())
    return is_signed or image.mode == "F" or (image.mode == "I" and image.format not in GREY_16_BIT)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale a grey image of 16 bits (a TIFF may have fewer, such as 12) down to 8 bits."""
    highest = 2 ** getattr(image, "tag_v2", {}).get(TIFF_BITS, (16,))[0] - 1
    pixels = np.asarray(image).astype(np.uint32)
    grey = Image.fromarray(((pixels * 255 + highest // 2) // highest).astype(np.uint8))
    if "transparency" in image.info:  # a single transparent shade
        grey.putalpha(Image.fromarray(np.where(pixels == image.info["transparency"], 0, 255).astype(np.uint8)))
    return grey
