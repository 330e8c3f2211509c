"""The files that predictions are written to: their names, and marks that tell them from others."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from utils.files import Kind, is_of_kind
from utils.text import counted

SHEET_ENDINGS = (".png", ".jpg", ".jpeg")
MARK = "halfstep, scripts/predict.py"  # metadata that marks our pictures, so that no other picture is overwritten
TABLE = Kind("a table of halfstep predict", (b"\xef\xbb\xbfimage_path,",))
DOCUMENT = Kind("a JSON file of halfstep predict", (b'{\n "model": {',))
PICTURE = Kind("a picture of halfstep predict", (b"\x89PNG", b"\xff\xd8"), MARK.encode())
PER_SHEET = 100


class Outputs(NamedTuple):
    """The places where a command writes. Input folders may contain pictures of an earlier call."""

    csv: Path | None = None
    json: Path | None = None
    sheet: Path | None = None
    into: Path | None = None
    attention: Path | None = None

    def without(self, images: list[str], root: str, report: Callable[[str], None]) -> list[str]:
        """Return the images that were found in `root`, without copies and pictures of an earlier call."""
        if not any((self.sheet, self.into, self.attention)):
            return images
        copies, maps = _start_below(root, self.into), _start_below(root, self.attention)
        sheets = _start_below(root, self.sheet and self.sheet.parent) + (self.sheet.stem if self.sheet else "")
        names = {each: os.path.abspath(each) for each in images}
        kept = [each for each in images if not names[each].startswith(copies)]
        others = {each for each in kept if names[each].startswith((maps, sheets)) and os.path.isfile(each)}
        kept = [each for each in kept if each not in others or not is_of_kind(Path(each), PICTURE)]
        if len(kept) < len(images):
            report(
                f"{root}: left out {counted(len(images) - len(kept), 'image')} in the folders that this call writes to"
            )
        return kept


def _start_below(root: str, folder: Path | None) -> str:
    """Return how paths in `folder` start if they are listed from `root`, or NUL if `folder` is outside `root`."""
    place = os.path.relpath(os.path.realpath(folder), os.path.realpath(root)) if folder else os.pardir
    return "\0" if place.startswith(os.pardir) else os.path.join(os.path.abspath(os.path.join(root, place)), "")


def numbered(stem: str, suffix: str = "", first: int = 1) -> Iterator[str]:
    """Return an endless iterator of names: photo.png, photo-2.png, photo-3.png ..."""
    return (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}" for number in itertools.count(first))


def sheet_paths(path: Path, num_images: int) -> list[Path]:
    """Return the paths of the sheets for this number of images."""
    names = numbered(path.stem, path.suffix)
    return [path.with_name(name) for name in itertools.islice(names, -(-num_images // PER_SHEET))]
