"""Writes HTML elements: whatever is not HTML already is escaped."""

import html
from collections.abc import Iterable

VOID = ("meta", "img", "source", "br")


class Markup(str):
    """Text that is HTML already."""


def escaped(value: object) -> Markup:
    """A value as text of a page. Halves of surrogate pairs, which names of files can have, become question marks."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(str(value).encode("utf-8", "replace").decode()))


def joined(parts: Iterable[object], between: str = "") -> Markup:
    return Markup(between.join(escaped(part) for part in parts if part is not None))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """`class_` is the attribute class, `aria_label` aria-label; an attribute that is None is left out, so is such a child."""
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    start = f"<{name}{''.join(words)}>"
    return Markup(start if name in VOID else f"{start}{joined(children)}</{name}>")


def section(title: str, *children: object) -> Markup:
    """A part of the page, with its heading."""
    return element("section", element("h2", title), *children)


def table(
    columns: Iterable[object], rows: Iterable[Iterable[object]], label: str, numbers: Iterable[int] = ()
) -> Markup:
    """A table that scrolls inside itself where it is too wide. `numbers`: columns that are set flush right."""
    right = set(numbers)
    place = lambda index: "number" if index in right else None  # noqa: E731
    head = [element("th", each, scope="col", class_=place(index)) for index, each in enumerate(columns)]
    body = [element("tr", *(element("td", cell, class_=place(i)) for i, cell in enumerate(row))) for row in rows]
    return scrolling(element("table", element("thead", element("tr", *head)), element("tbody", *body)), label)


def scrolling(content: Markup, label: str) -> Markup:
    """What is wider than the page moves inside its own frame, by keys too."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)
