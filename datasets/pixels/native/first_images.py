"""Looks into a few files to find the type of all values, or to warn if 8 bits would lose most of their levels."""

from collections.abc import Iterator

from configs.schema import Data
from datasets.pixels.native.values import with_facts
from datasets.pixels.rules import SHALLOW
from datasets.types import ImageReadError, ImageSet
from utils.errors import DataError
from utils.text import is_url, warning

NUM_TRIED = 10  # images until one can be read, which decides the type
DEEP_ENDINGS = (".png", ".tif", ".tiff", ".pgm")  # these files may have 16 bits


def look_into_files(data: Data, sets: list[ImageSet], notes: tuple[str, ...]) -> tuple[list[ImageSet], tuple[str, ...]]:
    """Return the sets with the type of their images' values, or with 8 bits a warning if these lose most levels."""
    if data.is_native:
        return with_type(sets), notes
    if is_url(data.DATA_PATH):  # a look would download a whole tar
        return sets, notes
    return sets, (*notes, *warn_of_lost_levels(sets[0]))


def with_type(sets: list[ImageSet]) -> list[ImageSet]:
    """Return the sets with the type of the first image that can be read. All other images must have this type."""
    first, reasons = sets[0], []
    if first.rules.native.kind != "native":
        return sets
    for index in range(min(NUM_TRIED, len(first))):
        try:
            kind = first.read(index).dtype.name
        except ImageReadError as error:
            reasons.append(f"{first.name(index)}: {error}")
            continue
        return [each.with_facts(rules=with_facts(each.rules, kind=kind)) for each in sets]
    raise DataError(f"{reasons[0]}; no image of the first {len(reasons)} can be read")


def warn_of_lost_levels(images: ImageSet) -> Iterator[str]:
    """Yield a warning if three images have 16 bits of which they use so few that 8 bits keep hardly any."""
    chosen = sorted({0, len(images) // 2, len(images) - 1})
    may_be_deep = all(images.name(index).lower().endswith(DEEP_ENDINGS) for index in chosen)
    if may_be_deep and all(SHALLOW in images.kinds(index) for index in chosen):
        yield warning(f"the images are {SHALLOW}; DATA.PIXELS=native keeps all (docs/pixels.md)")
