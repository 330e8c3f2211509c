"""Pictures drawn with Pillow: sheets of small images with captions, and the drawing of text."""

import bisect
import contextlib
import functools
import io
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from utils.files import replacing


class Lettering(NamedTuple):
    """A font with fallbacks. Text with letters that it lacks is drawn in the installed font that has most of them."""

    font: ImageFont.FreeTypeFont
    height: int  # height of a line in pixels

    def width(self, text: str) -> float:
        text = self._drawable(text)
        return self._font_of(text).getlength(text)

    def fit(self, text: str, width: float) -> str:
        """Return the text, shortened to its beginning and end if it is wider than `width` pixels.

        Two thirds of the result come from the end of the text, which distinguishes paths and names that begin alike.
        """
        text = self._drawable(text)
        font = self._font_of(text)
        if font.getlength(text) <= width:
            return text
        too_long = bisect.bisect_right(range(len(text)), width, key=lambda kept: font.getlength(shortened(text, kept)))
        return shortened(text, max(too_long - 1, 0))

    def wrap(self, text: str, width: float) -> list[str]:
        """Return the text as up to MOST_LINES lines, broken between words. Only a path or a last line is cut."""
        words = self._drawable(text).split(" ")
        parts, lines = [part for word in words for part in self._parts(word, width)], [""]
        for number, part in enumerate(parts):
            longer = lines[-1] + part
            if not lines[-1] or self.width(longer) <= width:
                lines[-1] = longer
            elif len(lines) < MOST_LINES:
                lines.append(part)
            else:
                lines[-1] += "".join(parts[number:])
                break
        return [self.fit(line, width) for line in lines]

    def _parts(self, word: str, width: float) -> list[str]:
        """Return a word with a space after it, in one part.

        A name that is too wide has a part after each "_" and "-".
        """
        is_path = "/" in word
        return [f"{word} "] if is_path or self.width(word) <= width else re.findall("[^_-]*[_-]|[^_-]+", f"{word} ")

    def draw(
        self, draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, color="black", anchor="la"
    ) -> None:
        """Draw the text at `place`. `anchor` is as in Pillow."""
        text = self._drawable(text)
        draw.text(place, text, fill=color, font=self._font_of(text), anchor=anchor)

    def _drawable(self, text: str) -> str:
        """Return the text on one line. Bytes of file names that are not valid text become question marks."""
        return " ".join(text.split()).encode("utf-8", "replace").decode()

    def _font_of(self, text: str) -> ImageFont.FreeTypeFont:
        missing = {letter for letter in text if not has_letter(self.font, letter)}
        if not missing:
            return self.font
        return max(
            [self.font, *other_fonts(self.font.size)], key=lambda font: sum(has_letter(font, x) for x in missing)
        )


def shortened(text: str, kept: int) -> str:
    """Return the text cut to `kept` characters, a third from its beginning and the rest from its end."""
    first = kept // 3
    return f"{text[:first]}…{text[len(text) - (kept - first) :]}"


@functools.cache
def lettering(size: int) -> Lettering:
    """Return matplotlib's copy of DejaVu Sans, which covers most alphabets.

    The font file is opened directly, because importing matplotlib would take longer than drawing a sheet.
    """
    folder = Path(find_spec("matplotlib").submodule_search_locations[0])
    path = folder / "mpl-data/fonts/ttf/DejaVuSans.ttf"
    return Lettering(ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC), round(size * 1.3))


@functools.cache
def other_fonts(size: int) -> list[ImageFont.FreeTypeFont]:
    """Return the installed fonts, regular ones first, for letters that DejaVu does not have, such as Chinese ones."""
    from matplotlib.font_manager import findSystemFonts

    fonts = []
    for path in sorted(findSystemFonts(), key=lambda file: ("regular" not in file.lower(), file)):
        with contextlib.suppress(OSError):  # bitmap fonts exist only in fixed sizes
            fonts.append(ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC))
    # LastResort is Apple's font that draws a box for every letter.
    return [font for font in fonts if "LastResort" not in str(font.getname()[0])]


@functools.cache
def has_letter(font: ImageFont.FreeTypeFont, letter: str) -> bool:
    """Return whether the font draws this letter differently from a character that no font has."""
    return letter.isascii() or bytes(font.getmask(letter)) != bytes(font.getmask("\U0010ffff"))


FONT_SIZE, GAP, FRAME = 11, 8, 4  # pixels
MOST_LINES = 3  # maximum number of lines for one text of a caption
MOST_TILES = 100  # maximum number of tiles read from a sheet's file
NO_IMAGE = (225, 225, 225)  # the colour shown for an unreadable image
PLACES = "halfstep tiles"  # the PNG text entry with the places and captions of a sheet's images


class Tile(NamedTuple):
    """One image of a sheet."""

    pixels: np.ndarray | None  # uint8 [H, W] or [H, W, 1 or 3] of any size; None for an empty place
    caption: Sequence[str] = ()  # each text starts on a new line and is wrapped
    frame: str | tuple[int, int, int] | None = None  # the colour of the frame; None for no frame


def contact_sheet(tiles: Sequence[Tile], num_columns: int = 6, side: int = 150, title: str = "") -> Image.Image:
    """Return a picture with rows of tiles below an optional title. Each image fits into a square of `side` pixels."""
    letters, width = lettering(FONT_SIZE), side + 2 * FRAME
    full_width, num_columns = GAP + num_columns * (width + GAP), min(num_columns, len(tiles))
    captions = [[line for text in each.caption for line in letters.wrap(text, width)] for each in tiles]
    height = width + letters.height * max(map(len, captions), default=0)
    above = letters.height + GAP if title else 0
    num_rows = -(-len(tiles) // max(num_columns, 1))
    needed = min(full_width, GAP + round(letters.width(title)) + GAP)
    size = (max(GAP + num_columns * (width + GAP), needed), GAP + above + num_rows * (height + GAP))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    letters.draw(draw, (GAP, GAP), letters.fit(title, size[0] - 2 * GAP))
    places = []
    for number, tile in enumerate(tiles):
        row, column = divmod(number, num_columns)
        left, top = GAP + column * (width + GAP), GAP + above + row * (height + GAP)
        if tile.frame:
            draw.rectangle((left, top, left + width - 1, top + width - 1), outline=tile.frame, width=FRAME)
        image, place = _placed(tile.pixels, side, left + FRAME, top + FRAME)
        sheet.paste(image, place)
        places.append((*place, place[0] + image.width, place[1] + image.height, list(tile.caption)))
        for line, text in enumerate(captions[number]):
            letters.draw(draw, (left, top + width + line * letters.height), text)
    sheet.info[PLACES] = json.dumps(places)
    return sheet


def tiles_of(sheet: Image.Image) -> list[tuple[Image.Image, list[str]]]:
    """Return each image of a sheet with its caption, so that a page can rearrange them, or [] for other pictures.

    Raise ValueError if a place in the file is outside the picture, or if there are too many places.
    """
    tiles = []
    for left, top, right, bottom, caption in json.loads(sheet.info.get(PLACES, "[]")):
        if not (0 <= left < right <= sheet.width and 0 <= top < bottom <= sheet.height) or len(tiles) == MOST_TILES:
            raise ValueError("the places of the tiles are invalid")
        tiles.append((sheet.crop((left, top, right, bottom)), [str(line) for line in caption]))
    return tiles


def _placed(pixels: np.ndarray | None, side: int, left: int, top: int) -> tuple[Image.Image, tuple[int, int]]:
    """Return the image at its display size (a plain square for None), and its upper left corner in its square."""
    if pixels is None:
        return Image.new("RGB", (side, side), NO_IMAGE), (left, top)
    image = fitted(pixels, side)
    return image, (left + (side - image.width) // 2, top + (side - image.height) // 2)


def fitted(pixels: np.ndarray, side: int) -> Image.Image:
    """Return the image resized to fit into a square of `side` pixels.

    Tiny images are enlarged without smoothing, because a blurred digit of 8 x 8 pixels is unrecognisable.
    """
    image = Image.fromarray(pixels if pixels.ndim == 2 or pixels.shape[2] > 1 else pixels[:, :, 0]).convert("RGB")
    factor = side / max(image.size)
    size = tuple(max(1, round(each * factor)) for each in image.size)
    if factor >= 2:
        return image.resize(size, Image.Resampling.NEAREST)
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)


def encoded(image: Image.Image, ending: str = ".png", mark: str = "") -> bytes:
    """Return the content of a PNG or JPEG file, with the places of a sheet's tiles.

    `mark`: the program that drew it.
    """
    content, texts = io.BytesIO(), PngImagePlugin.PngInfo()
    if mark:  # at the start, where readers look for it
        texts.add_text("Software", mark)
    if PLACES in image.info:
        texts.add_text(PLACES, image.info[PLACES], zip=True)
    is_png = ending == ".png"
    options = {"pnginfo": texts, "compress_level": 4} if is_png else {"comment": mark}
    image.save(content, "PNG" if is_png else "JPEG", **options)
    return content.getvalue()


def write_picture(image: Image.Image, path: Path) -> None:
    """Write a PNG. An older file is replaced once the new one is complete. Raise OSError if the disk is full."""
    with replacing(path) as file:
        file.write(encoded(image))
