"""Text in a picture: a font that is there, and lines cut to a width."""

import bisect
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from PIL import ImageDraw, ImageFont


class Lettering(NamedTuple):
    """A font, and what it can draw: any text, with a box for what it has no glyph for."""

    font: ImageFont.FreeTypeFont | ImageFont.ImageFont
    height: int  # of a line, pixels

    def width(self, text: str) -> float:
        return self.font.getlength(self._drawable(text))

    def fit(self, text: str, width: float) -> str:
        """The text, or its beginning and its end: of paths and of names that begin alike, the end tells more."""
        text = self._drawable(text)
        if self.width(text) <= width:
            return text
        too_long = bisect.bisect_right(range(len(text)), width, key=lambda kept: self.width(shortened(text, kept)))
        return shortened(text, max(too_long - 1, 0))

    def draw(
        self, draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, color="black", anchor="la"
    ) -> None:
        """`anchor` as in Pillow; only fonts with outlines follow it."""
        has_outlines = isinstance(self.font, ImageFont.FreeTypeFont)
        draw.text(place, self._drawable(text), fill=color, font=self.font, anchor=anchor if has_outlines else None)

    def _drawable(self, text: str) -> str:
        """In one line, without bytes of file names that are no text; Pillow's own font has the letters of Latin-1 only."""
        text = " ".join(text.split()).encode("utf-8", "replace").decode()
        if isinstance(self.font, ImageFont.FreeTypeFont):
            return text
        return text.replace("…", "..").encode("latin-1", "replace").decode("latin-1")


def shortened(text: str, kept: int) -> str:
    """So many characters of a text: a third of them from its beginning."""
    first = kept // 3
    return f"{text[:first]}…{text[len(text) - (kept - first) :]}"


@functools.cache
def lettering(size: int) -> Lettering:
    """DejaVu Sans, which has most alphabets; where matplotlib's copy is missing, the font in Pillow."""
    try:
        # Without importing matplotlib, which takes longer than drawing a sheet.
        folder = Path(find_spec("matplotlib").submodule_search_locations[0])
        path = folder / "mpl-data/fonts/ttf/DejaVuSans.ttf"
        font = ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
    except (OSError, ImportError, AttributeError, TypeError, ValueError):
        font = ImageFont.load_default(size)
    return Lettering(font, round(size * 1.3))
