"""confusion.png: which class is taken for which, readable with ten classes and with thousands."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from engine.evaluation.tally import ImageResults
from engine.record.image_tables import Names, cells
from utils.lettering import Lettering, lettering
from utils.text import counted

SIDE, LARGEST_CELL, SMALLEST_MARK = 800, 48, 3  # pixels: of the matrix at least, of a cell at most, of a mark
# Classes. With more only some are named, and the commonest mistakes are listed beside the matrix.
MOST_WITH_NUMBERS = 40
NUM_NAMED, NUM_LISTED = 25, 40
NAMES_WIDTH, LIST_WIDTH, GAP = 130, 420, 12
RIGHT, WRONG = (31, 119, 180), (214, 39, 40)  # colours of cells on the diagonal and beside it


class Cell(NamedTuple):
    """One that is not zero."""

    row: int
    column: int
    count: int
    share: float  # of the images of its row


def draw_confusion(results: ImageResults, names: Names) -> Image.Image:
    """Rows are labels, columns predictions; the darker a cell, the larger its share of the images of its row."""
    letters, shown = lettering(11), names.shown(results)
    titles, found = [names[number] for number in shown.tolist()], list(_cells(results, shown))
    has_numbers = len(shown) <= MOST_WITH_NUMBERS
    pitch = min(LARGEST_CELL, SIDE / len(shown)) if has_numbers else SIDE / len(shown)
    side = round(pitch * len(shown))
    every = 1 if has_numbers else -(-len(shown) // NUM_NAMED)
    margin = GAP + round(min(NAMES_WIDTH, max(map(letters.width, titles[::every]))))
    left, top = GAP + margin, 2 * GAP + letters.height
    width = left + side + GAP + (0 if has_numbers else LIST_WIDTH)
    title = f"{counted(len(results.indices), 'validation image')}: rows are labels, columns predictions"
    size = max(width, GAP + round(letters.width(title)) + GAP), top + side + margin + GAP
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    letters.draw(draw, (GAP, GAP), title)
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline="grey")
    for cell in sorted(found, key=lambda cell: cell.share):  # what overlaps is of the largest share
        x, y, size = left + cell.column * pitch, top + cell.row * pitch, max(pitch, SMALLEST_MARK)
        darkness = 0.15 + 0.85 * cell.share
        base = RIGHT if cell.row == cell.column else WRONG
        color = tuple(round(255 + darkness * (each - 255)) for each in base)
        draw.rectangle((x, y, x + size - 1, y + size - 1), fill=color)
        if has_numbers:
            middle = (x + pitch / 2, y + pitch / 2)
            letters.draw(draw, middle, str(cell.count), "white" if darkness > 0.5 else "black", anchor="mm")
    _name_axes(picture, letters, titles[::every], (left, top, top + side + 6, every * pitch, pitch))
    if not has_numbers:
        _list_mistakes(draw, letters, titles, found, (left + side + 2 * GAP, top))
    return picture


def _cells(results: ImageResults, shown: np.ndarray) -> Iterator[Cell]:
    labels, predictions, counts = cells(results)
    shares = counts / np.maximum(results.counts[0][labels], 1)
    rows, columns = (np.searchsorted(shown, each) for each in (labels, predictions))
    return map(Cell._make, zip(*(each.tolist() for each in (rows, columns, counts, shares)), strict=True))


def _name_axes(
    picture: Image.Image, letters: Lettering, titles: list[str], matrix: tuple[int, int, int, float, float]
) -> None:
    """Names to the left of some rows and, turned, below these columns. `matrix`: its left and top, where
    these begin, the distance of two names, and the size of a cell.
    """
    left, top, bottom, distance, pitch = matrix
    draw = ImageDraw.Draw(picture)
    for number, title in enumerate(titles):
        text, middle = letters.fit(title, NAMES_WIDTH), number * distance + pitch / 2
        letters.draw(draw, (left - 6, top + middle), text, anchor="rm")
        turned = Image.new("RGB", (NAMES_WIDTH, letters.height), "white")
        letters.draw(ImageDraw.Draw(turned), (NAMES_WIDTH, letters.height / 2), text, anchor="rm")
        picture.paste(turned.transpose(Image.Transpose.ROTATE_90), (round(left + middle - letters.height / 2), bottom))


def _list_mistakes(
    draw: ImageDraw.ImageDraw, letters: Lettering, titles: list[str], found: list[Cell], place: tuple[int, int]
) -> None:
    """The commonest mistakes, which single marks in a large matrix do not tell."""
    x, y = place
    wrong = sorted((cell for cell in found if cell.row != cell.column), key=lambda cell: (-cell.count, -cell.share))
    letters.draw(draw, (x, y), "label taken for prediction: images (of those with the label)")
    for number, cell in enumerate(wrong[:NUM_LISTED], start=2):
        numbers = f": {cell.count} ({cell.share:.0%})"
        half = (LIST_WIDTH - 3 * GAP - letters.width(f" → {numbers}")) / 2
        row, column = (letters.fit(titles[each], half) for each in (cell.row, cell.column))
        letters.draw(draw, (x, y + number * letters.height), f"{row} → {column}{numbers}")
