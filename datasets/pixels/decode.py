"""Decoding of image files to pixels with Pillow, or with libjpeg if it is faster and gives Pillow's pixels."""

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from datasets.pixels.rules import ImageReadError, Images, PixelRules
from utils.commands import page, pip
from utils.text import warning

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow reads everything, JPEGs at about half the speed
    simplejpeg = None

# {file suffix: the optional module that reads it}
READ_BY = {".avif": "PIL._avif", ".heic": "pillow_heif", ".heif": "pillow_heif", ".hif": "pillow_heif"}
KNOWN_ENDINGS = (".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", *READ_BY)
# The formats that Pillow may detect. EPS is excluded, because Pillow would start a program with code from the file.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF", *(("AVIF",) if find_spec("PIL._avif") else ()))
DEEP_ENDINGS = (".png", ".tif", ".tiff", ".pgm")  # these files may have 16 bits
IMAGE_ENDINGS = tuple(each for each in KNOWN_ENDINGS if each not in READ_BY or find_spec(READ_BY[each]))
# Conversions that libjpeg does itself, with Pillow's result. CMYK needs Pillow, because Adobe's files invert it.
LIBJPEG_CONVERSIONS = {3: {"YCbCr": "RGB", "RGB": "RGB", "Gray": "RGB"}, 1: {"Gray": "GRAY"}}
JPEG_START, JPEG_END, SCAN, APP1, START_OF_SCAN, EXIF = b"\xff\xd8", b"\xff\xd9", b"\xff\xda", 0xE1, 0xDA, b"Exif\0\0"
SEQUENTIAL = (0xC0, 0xC1)  # markers of frames whose image is complete after one scan of all colours
SEGMENTS = {*range(0xC0, 0xD0), *range(0xDB, 0xF0), 0xFE}  # other markers that are followed by a length
# Each scan of a progressive JPEG updates the whole image, so a small file could take minutes. Encoders write about 10.
# The first limit holds for images of any size. Small images may have more scans, up to the second limit, as long as
# scans x pixels stay below MOST_OF_SCANS.
MOST_SCANS, MOST_OF_SCANS = (64, 500), 10**10
MARKER = re.compile(rb"\xff[^\0\1\xd0-\xd7\xff]")  # the end of the image, and markers that are followed by a length
MARKERS = {bytes((0xFF, number)) for number in range(256) if MARKER.match(bytes((0xFF, number)))}
# Limits on the reads and pieces of a file. Pillow's parsers take microseconds per read, and copy the rest of the file
# for each piece of EXIF data or comment.
BYTES_PER_READ, USUAL_READS, MOST_PIECES = 64, 2**16, 100
PIECES = {JPEG_START: EXIF, b"P1": b"#", b"P2": b"#", b"P3": b"#"}  # {first bytes of the file: start of a piece}
WEBP_COST = 1.6  # relative cost of a pixel: Pillow needs 17 to 21 bytes per pixel of a WebP, 9 to 13 in other formats
LOG_OF_TIFFS = logging.getLogger("PIL.TiffImagePlugin")
LEAST_WIDTH = 16  # narrower rows cost as much as a row of this many pixels
# A JPEG of at most this many bytes x pixels is decoded in less than a second, because each scan has at least 10 bytes.
QUICK = 2**34
ORIENTATION = ExifTags.Base.Orientation
# Programs that edit photos write the orientation to XMP. Pillow reads it there if EXIF does not have it.
XMP, XMP_ORIENTATION = b"http://ns.adobe.com/xap/1.0/\0", re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
TURNED = (2, 3, 4, 5, 6, 7, 8)  # EXIF orientations of images that are not upright
OPPOSITE = {6: 8, 8: 6}  # {orientation: the orientation whose change undoes it}; all others undo themselves
MODES = {1: "L", 3: "RGB"}  # Pillow's modes by number of channels
GREY_16_BIT = ("PNG", "PPM")  # formats whose images have 16 bits if Pillow opens them in mode I (32-bit integers)
SHALLOW, HIGHEST_OF_SHALLOW = "16-bit files that use 12 bits or fewer, so 8 bits keep at most 16 of their levels", 2**12
KEEP_VALUES = f"set DATA.PIXELS=native, which keeps the values of the files ({page('docs/pixels.md')})"
TIFF_BITS = ExifTags.Base.BitsPerSample


def decode(data: bytes, rules: PixelRules) -> np.ndarray:
    """Return the pixels of an image file as uint8 [H, W, channels]. Raise ImageReadError if it cannot be read."""
    with naming_errors(data, rules):
        pixels = _decode_jpeg(data, rules) if simplejpeg and data[:2] == JPEG_START else None
        return _decode_any(data, rules) if pixels is None else pixels


@contextlib.contextmanager
def naming_errors(data: bytes, rules: PixelRules) -> Iterator[None]:
    """Raise ImageReadError for every error of a decoder of this file."""
    try:
        yield
    except ImageReadError:
        raise
    except UnidentifiedImageError as error:  # Pillow's own message has the address of an object in memory
        from datasets.pixels.native.unread import describe_unread

        text = describe_unread(data) or (
            "UnidentifiedImageError: the file is empty or has a format that halfstep does not read"
        )
        raise ImageReadError(text) from error
    except Image.DecompressionBombError as error:
        raise ImageReadError(f"{error}; DATA.MAX_PIXELS is {rules.max_pixels}") from error
    except Exception as error:  # Pillow's parsers raise many types of errors for broken files
        raise ImageReadError(f"{type(error).__name__}: {error}") from error


def kinds_of(read: Callable[[], bytes], rules: PixelRules) -> list[str]:
    """Return the unusual properties of an image file, as -check prints them, or [] if it is not an image."""
    try:
        data = read()
        with open_image(data, rules) as image:
            is_deep = any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())) and not has_unknown_range(image)
            is_shallow = is_deep and image.mode.startswith("I") and image.getextrema()[1] < HIGHEST_OF_SHALLOW
            kinds = {
                "16-bit": is_deep and not is_shallow,
                SHALLOW: is_shallow,
                "32-bit or signed (refused)": has_unknown_range(image),
                "transparent": image.has_transparency_data,
                "CMYK": image.mode == "CMYK",
                # Further pictures in a camera's MPO file are previews.
                "animated or multi-page": getattr(image, "is_animated", False) and image.format != "MPO",
                # This may read the whole image, and changes the others.
                f"EXIF-rotated ({'applied' if rules.applies_exif else 'ignored'})": orientation_of(data, image)
                in TURNED,
            }
            return [kind for kind, applies in kinds.items() if applies]
    except Exception:  # `decode` reports the reason
        return []


def warn_of_lost_levels(images: Images) -> list[str]:
    """Return a warning if three images have 16 bits of which they use so few that 8 bits keep hardly any."""
    chosen = sorted({0, len(images) // 2, len(images) - 1})
    may_be_deep = all(images.name(index).lower().endswith(DEEP_ENDINGS) for index in chosen)
    if may_be_deep and all(SHALLOW in images.kinds(index) for index in chosen):
        return [warning(f"the images are {SHALLOW}; DATA.PIXELS=native keeps all ({page('docs/pixels.md')})")]
    return []


def _decode_jpeg(data: bytes, rules: PixelRules) -> np.ndarray | None:
    """Decode a JPEG with libjpeg. Return None if Pillow must read it because of its colour space or an error."""
    with contextlib.suppress(ValueError):
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _refuse_bomb(data, width, height, rules)
        if colours in LIBJPEG_CONVERSIONS[rules.num_channels]:
            pixels = simplejpeg.decode_jpeg(data, LIBJPEG_CONVERSIONS[rules.num_channels][colours])
            return _upright(pixels, orientation_of(data)) if rules.applies_exif else pixels
    return None


def _decode_any(data: bytes, rules: PixelRules) -> np.ndarray:
    with open_image(data, rules) as image:
        is_turned = image.format == "TIFF"  # Pillow applies a TIFF's orientation when it reads the pixels
        orientation = orientation_of(data, image) if is_turned != rules.applies_exif else 1
        return _upright(to_array(image, rules), OPPOSITE.get(orientation, orientation) if is_turned else orientation)


def to_array(image: Image.Image, rules: PixelRules) -> np.ndarray:
    """Return a Pillow image, or its first frame, as uint8 [H, W, rules.num_channels]."""
    if has_unknown_range(image):
        raise ImageReadError(
            f"it has 32 bits per pixel or signed values (Pillow's mode {image.mode}), whose range is unknown; save it "
            f"with 8 or 16 bits, or set DATA.PIXELS=native ({page('docs/pixels.md')})"
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


class _Reads(io.BytesIO):
    """A file in memory for Pillow's parsers, with a limit on reads because some files could take minutes."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._left = USUAL_READS + len(data) // BYTES_PER_READ
        if data.count(PIECES.get(data[:2], data)) > MOST_PIECES:
            self._left = 0

    def read(self, size: int | None = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ImageReadError("it consists of too many pieces, which could take minutes to read; save it again")
        return super().read(size)


def open_image(data: bytes, rules: PixelRules) -> Image.Image:
    """Open an image with Pillow, or a HEIF photo with pillow-heif."""
    Image.MAX_IMAGE_PIXELS = rules.max_pixels  # for Pillow's own checks while it opens the file
    LOG_OF_TIFFS.disabled = True  # it would print what the error says
    try:
        image = Image.open(_Reads(data), formats=FORMATS)
    except UnidentifiedImageError:
        if data[4:8] != b"ftyp" or data[8:11] == b"avi":  # not HEIF, or a damaged AVIF file
            raise
        image = _open_heif(data, rules)
    _refuse_bomb(data, *image.size, rules, WEBP_COST if image.format == "WEBP" else 1)
    return image


def _open_heif(data: bytes, rules: PixelRules) -> Image.Image:
    try:
        from pillow_heif import open_heif
    except ImportError as error:
        raise ImageReadError(f"a HEIF photo (.heic) needs pillow-heif: {pip('install')} pillow-heif") from error
    photo = open_heif(data)
    _refuse_bomb(data, *photo.size, rules)
    return photo.to_pillow()


def orientation_of(data: bytes, image: Image.Image | None = None) -> int:
    """Return the orientation from EXIF data, or from XMP data if EXIF has none, as in Pillow. The default is 1.

    `image` is needed unless this is a JPEG. For a HEIF file, return 1, because pillow-heif has applied the orientation.
    """
    with contextlib.suppress(Exception):  # EXIF data is often damaged, which does not harm the pixels
        if image is None or data[:2] == JPEG_START:
            return _jpeg_exif(data).get(ORIENTATION, 1)
        if image.format != "TIFF":  # loading a TIFF applies its orientation and removes it
            image.load()
        return image.getexif().get(ORIENTATION, 1)
    return 1


def _jpeg_exif(data: bytes) -> Image.Exif:
    """Return the EXIF data from the segments before the image. This is cheap; Pillow would read the header again."""
    exif, parts, xmp = Image.Exif(), [], b""
    for marker, start, end in _segments(data):
        if marker == APP1 and data.startswith(EXIF, start):
            parts.append(data[start + len(EXIF) : end])
        elif marker == APP1 and data.startswith(XMP, start):
            xmp = data[start + len(XMP) : end]
    if parts:
        exif.load(EXIF + b"".join(parts))
    if ORIENTATION not in exif and (match := XMP_ORIENTATION.search(xmp)):
        exif[ORIENTATION] = int(match[1])
    return exif


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of a JPEG's segments, up to the segment of the first scan."""
    marker, end = 0, 2
    while marker != START_OF_SCAN:
        length = end + 2  # the place of the length, after the marker
        if data[end:length] not in MARKERS:
            # Like Pillow and libjpeg, skip fill bytes (0xFF) and other bytes between two segments.
            match = MARKER.search(data, end)
            if match is None:
                return
            length = match.end()
        marker, start = data[length - 1], length + 2
        end = length + int.from_bytes(data[length:start], "big")
        yield marker, start, end


def _refuse_scans(data: bytes, num_pixels: int) -> None:
    """Enforce the limit on scans. Scans are counted only if the header does not show that there is a single scan."""
    num_colours = None
    with contextlib.suppress(IndexError):  # the header is incomplete
        for marker, start, _ in _segments(data):
            if marker in SEQUENTIAL:
                num_colours = data[start + 5]
            elif marker == START_OF_SCAN and data[start] == num_colours:
                return
            elif marker not in SEGMENTS:
                break
    most = min(max(MOST_SCANS[0], MOST_OF_SCANS // num_pixels), MOST_SCANS[1])
    count, end = 0, 2
    while (match := MARKER.search(data, end)) and match[0] != JPEG_END:
        count += match[0] == SCAN
        end = match.end() + int.from_bytes(data[match.end() : match.end() + 2], "big")
        if count > most:
            raise ImageReadError(f"it has more than {most} JPEG scans, which could take minutes to read; save it again")


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return an upright view of the pixels [H, W, ...] of an image with this EXIF orientation."""
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels.swapaxes(0, 1) if orientation in (5, 6, 7, 8) else pixels


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation not in TURNED:
        return pixels
    whole_pixels = pixels.view(f"V{pixels.shape[2]}")  # numpy copies whole pixels twice as fast as single channels
    return np.ascontiguousarray(turn(whole_pixels, orientation)).view(np.uint8)


def _refuse_bomb(data: bytes, width: int, height: int, rules: PixelRules, cost: float = 1) -> None:
    """Enforce the limits on decompressed pixels and scans. Pillow itself only warns below twice the pixel limit."""
    if max(width, LEAST_WIDTH) * height * cost > rules.max_pixels:
        cost_of_webp = f", and each pixel of a WebP counts as {cost}" if cost > 1 else ""
        raise Image.DecompressionBombError(f"{width} x {height} pixels{cost_of_webp}")
    if len(data) * width * height > QUICK and data[:2] == JPEG_START:
        _refuse_scans(data, width * height)
