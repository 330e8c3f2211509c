"""Builds HTML elements, and writes a page as one file without scripts and without links to other files."""

import base64
import hashlib
import html
import io
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from engine.predict.pictures import tiles_of
from utils.files import Kind, content_of, write_text
from utils.text import escape_controls

# The first bytes that `write_page` writes. Pages of other programs start differently.
PAGE = Kind("a report of a run", (b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',), b"style-src")
VOID = ("meta", "img", "source", "br")
STYLE = Path(__file__).parent / "style.css"
MOST_BYTES = 160_000  # a picture up to this size is embedded unchanged
LARGEST = 2**26  # bytes; a larger file is not read as a run's picture
WIDTH, QUALITY = 1000, 60  # width in pixels of a larger picture, and JPEG quality of photos
MOST_COLORS = 256  # an image with more colors is a photo


class Markup(str):
    """Text that is HTML already and must not be escaped."""


def escaped(value: object) -> Markup:
    """Return a value as HTML text, with control characters escaped.

    Halves of surrogate pairs, which file names can contain, become question marks.
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(escape_controls(str(value).encode("utf-8", "replace").decode())))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an HTML element. `class_` sets class, `aria_label` sets aria-label.

    Attributes and children that are None are left out.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = [f' {key}="{escaped(value)}"' for key, value in given.items()]
    inside = "".join(escaped(child) for child in children if child is not None)
    start = f"<{name}{''.join(words)}>"
    return Markup(start if name in VOID else f"{start}{inside}</{name}>")


def section(title: str, *children: object) -> Markup:
    """Return a section of a page with this heading and these children."""
    return element("section", element("h2", title), *children)


def table(
    columns: Iterable[object], rows: Iterable[Iterable[object]], label: str, numbers: Iterable[int] = ()
) -> Markup:
    """Return a table that scrolls in its own frame if it is too wide. `numbers`: indices of right-aligned columns."""
    place = dict.fromkeys(numbers, "number")
    head = [element("th", each, scope="col", class_=place.get(index)) for index, each in enumerate(columns)]
    body = [element("tr", *(element("td", cell, class_=place.get(i)) for i, cell in enumerate(row))) for row in rows]
    return scrolling(element("table", element("thead", element("tr", *head)), element("tbody", *body)), label)


def scrolling(content: Markup, label: str) -> Markup:
    """Return a frame in which content wider than the page can be scrolled, also with the keyboard."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def write_page(path: Path, title: str, body: Iterable[object]) -> None:
    """Write a page with a security policy that allows only the page's style sheet and embedded pictures."""
    style = STYLE.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(style)),
    )
    write_text(path, f"<!doctype html>\n{element('html', head, element('body', *body), lang='en')}\n")


def contact_sheet(path: Path, alt: str) -> Markup | None:
    """Return the images of a sheet one by one, with captions as text. A row has as many images as fit into the window.

    Return None if the file is not a sheet.
    """
    try:
        with Image.open(io.BytesIO(content_of(path, LARGEST)), formats=("PNG",)) as image:
            tiles = tiles_of(image)
    except (OSError, ValueError, TypeError, RecursionError, Image.DecompressionBombError):
        return None
    figures = [
        element("figure", picture(*smallest(pixels), alt, "tile"), *(element("figcaption", line) for line in caption))
        for pixels, caption in tiles
    ]
    has_names = any(len(caption) > 1 for _, caption in tiles)
    return element("div", *figures, class_="tiles" if has_names else "small tiles") if figures else None


def smallest(image: Image.Image) -> tuple[bytes, str]:
    """Return the encoded image and its format: PNG if that is smaller, which is likely for drawings, otherwise JPEG."""
    image = image.convert("RGB")
    kinds = {"jpeg": {"quality": QUALITY, "optimize": True}}
    if image.getcolors(MOST_COLORS):  # PNG is never smaller for photos, and encoding 240 x 240 pixels takes 20 ms
        kinds["png"] = {"optimize": True}
    found = []
    for kind, options in kinds.items():
        target = io.BytesIO()
        image.save(target, kind, **options)
        found.append((target.getvalue(), kind))
    return min(found, key=lambda each: len(each[0]))


def embedded(path: Path, alt: str, class_: str) -> Markup | None:
    """Return a picture of the run, smaller if it is large. Return None if the file is not a picture."""
    try:
        content, kind = content_of(path, LARGEST), "png"
        if len(content) > MOST_BYTES or not content.startswith(b"\x89PNG"):
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
                image.thumbnail((WIDTH, 4 * WIDTH))
                content, kind = smallest(image)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return picture(content, kind, alt, class_)


def picture(content: bytes, kind: str, alt: str, class_: str) -> Markup:
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return element("img", src=source, alt=alt, class_=f"picture {class_}")
