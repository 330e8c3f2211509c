"""Files of the same picture as cameras, scanners and drawing programs write them."""

import io

import numpy as np
import pillow_heif
from PIL import Image
from PIL.PngImagePlugin import PngInfo

BLOCK = 8
# Six different blocks of colour, 24 x 16 pixels in total, so that every rotation and flip is visible.
COLOURS = [[(250, 10, 10), (10, 250, 10), (10, 10, 250)], [(250, 250, 10), (10, 10, 10), (250, 250, 250)]]
PICTURE = np.array(COLOURS, np.uint8).repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
GREY = np.arange(0, 240, 5, dtype=np.uint8).reshape(6, 8)

# {EXIF orientation: the transform from the upright picture to the stored one}
HELD = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
EXACT = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "WEBP": {"lossless": True},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    "HEIF": {"quality": 100, "chroma": 444},
}


def encoded(image: Image.Image | np.ndarray, form: str, **options) -> bytes:
    content = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    if form == "HEIF":
        pillow_heif.from_pillow(image).save(content, **EXACT[form])
    else:
        image.save(content, form, **EXACT.get(form, {}) | options)
    return content.getvalue()


def photo(form: str, orientation: int = 1) -> bytes:
    """Return PICTURE as a camera with this orientation stores it."""
    exif, image = Image.Exif(), Image.fromarray(PICTURE)
    exif[0x010F], exif[0x0112] = "maker", orientation
    return encoded(image.transpose(HELD[orientation]) if orientation > 1 else image, form, exif=exif)


XMP = {
    "attribute": '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>',
    "element": "<x:xmpmeta xmlns:x='adobe:ns:meta/'><tiff:Orientation>{}</tiff:Orientation></x:xmpmeta>",
}


def edited_photo(form: str, orientation: int, style: str = "attribute", exif: Image.Exif | None = None) -> bytes:
    """Return PICTURE as a camera with this orientation stores it, with the orientation only in the XMP data."""
    image = Image.fromarray(PICTURE)
    image = image if HELD.get(orientation) is None else image.transpose(HELD[orientation])
    text, options = XMP[style].format(orientation), {"exif": exif} if exif else {}
    if form == "PNG":
        options["pnginfo"] = PngInfo()
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", text)
    elif form == "TIFF":
        options["tiffinfo"] = {700: text.encode()}
    else:
        options["xmp"] = text.encode()
    return encoded(image, form, **options)


def grey_16_bits(form: str) -> bytes:
    """Return GREY in 16 bits, with noise in the lower eight."""
    return encoded(GREY.astype(np.uint16) * 257 + 100, form)


def hidden_colours(mode: str, form: str) -> bytes:
    """Return PICTURE with a transparent upper half."""
    alpha = np.repeat([0, 255], BLOCK).astype(np.uint8)[:, None].repeat(PICTURE.shape[1], axis=1)
    image = Image.fromarray(np.dstack([PICTURE, alpha]))
    if mode == "P":
        image = image.quantize(16)
    return encoded(image.convert(mode), form)


def animation(form: str) -> bytes:
    """Return two frames: PICTURE with a border that is transparent except for two corners, then a black frame."""
    first = Image.new("RGBA", (40, 32))
    first.paste(Image.fromarray(PICTURE), (8, 8))
    for corner in ((0, 0), (39, 31)):
        first.putpixel(corner, (*COLOURS[0][0], 255))
    second = Image.new("RGBA", (40, 32), (0, 0, 0, 255))
    return encoded(first, form, save_all=True, append_images=[second], duration=100, disposal=2)
