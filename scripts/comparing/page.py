"""A comparison as one HTML page without scripts, light or dark as the browser is."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

from engine.record.page import Markup, element, picture, section, table, write_page
from scripts.comparing.curves import columns_of, draw, title_of
from scripts.comparing.tables import Comparison, Table

FIGURE = re.compile(r"[\d.,]+( ± [\d.,]+)?( [a-zA-Z]+)?|-?")


def write_comparison(path: Path, comparison: Comparison) -> None:
    write_page(path, comparison.title, _body(comparison))


def _body(comparison: Comparison) -> Iterator[Markup]:
    yield element("header", element("h1", comparison.title), element("p", comparison.result, class_="lead"))
    if comparison.warning:
        yield element("p", f"Warning: {comparison.warning}", class_="notice")
    results, *others = comparison.tables
    notes = [element("p", note, class_="soft") for note in comparison.notes]
    yield section(results.title, _table(results), *notes)
    curves = [_curves(comparison, column) for column in columns_of(comparison.groups)]
    yield section("Curves", element("div", *curves, class_="grid"))
    for each in others:
        yield section(each.title, _table(each))


def _table(found: Table) -> Markup:
    rows = [
        [element("strong", cell) if cell and number in found.strong else cell for cell in row]
        for number, row in enumerate(found.rows)
    ]
    columns = enumerate(zip(*found.rows, strict=True))
    return table(
        found.header, rows, found.title, [index for index, cells in columns if all(map(FIGURE.fullmatch, cells))]
    )


def _curves(comparison: Comparison, column: str) -> Markup:
    """A picture for light pages and one for dark ones; the browser shows one of them."""
    light, dark = (draw(comparison.groups, [column], dark) for dark in (False, True))
    source = f"data:image/png;base64,{base64.b64encode(dark).decode()}"
    label = f"{title_of(column)} by epoch, a line for each group"
    chosen = element("source", srcset=source, media="(prefers-color-scheme: dark)")
    return element("figure", element("picture", chosen, picture(light, "png", label, "curves")))
