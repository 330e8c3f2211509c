"""The kinds of pixels: from DATA.PIXELS to its class, and which kind reads which files."""

import functools
from collections.abc import Collection

from configs.schema import Data
from configs.tables import PIXEL_KINDS
from datasets.pixels import Pixels


def pixels_of(data: Data) -> Pixels:
    """Return the pixels of a run."""
    return kind_of_pixels(data.PIXELS).of(data)


def kind_of_pixels(name: str) -> type[Pixels]:
    """Return the class of the pixels that a value of DATA.PIXELS names."""
    if name == Pixels.name:
        return Pixels
    from datasets.pixels.native.pixels import NativePixels

    return NativePixels


@functools.cache
def readers() -> dict[str, type[Pixels]]:
    """Return {ending: the first pixels in PIXEL_KINDS that read such files} for files that 8 bits cannot read."""
    kinds = dict.fromkeys(kind_of_pixels(name) for name in reversed(PIXEL_KINDS))
    return {ending: kind for kind in kinds for ending in kind.own_endings}


def hint_of_formats(endings: Collection[str], where: str = "") -> str:
    """Return the pixels that could read files with these endings, or "". `where`: their page."""
    kinds = dict.fromkeys(kind for ending, kind in readers().items() if ending in endings)
    return "".join(f"; DATA.PIXELS={kind.name} reads {kind.own_files}{where}" for kind in kinds)
