"""The frame of a page: one file, no script, and nothing that a browser would fetch."""

import base64
import hashlib
import io
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from engine.record.html import Markup, element, joined
from utils.files import write_text

STYLE = Path(__file__).parent / "style.css"
MOST_BYTES = 160_000  # of a picture that is embedded as it is
MOST_JPEG_BYTES = 400_000  # of a recompressed one, where the lowest quality gets there
QUALITIES = (80, 60, 40)  # of JPEG
WIDTH = 1000  # pixels, of a larger one that is made smaller


@cache
def style() -> str:
    return STYLE.read_text(encoding="utf-8")


def page(title: str, body: Iterable[object]) -> str:
    """The whole page. Its security policy allows its own style sheet and pictures inside the file, nothing else."""
    digest = base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(style())),
    )
    return "<!doctype html>\n" + element("html", head, "\n", element("body", joined(body, "\n")), lang="en") + "\n"


def write_page(path: Path, title: str, body: Iterable[object]) -> None:
    write_text(path, page(title, body))


def embedded(path: Path, alt: str, class_: str) -> Markup | None:
    """A picture of the run inside the page, recompressed if it is large; None if the file is no picture."""
    content, kind = path.read_bytes(), "png"
    if len(content) > MOST_BYTES or not content.startswith(b"\x89PNG"):
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
                small = image.convert("RGB")
        except (OSError, ValueError, Image.DecompressionBombError):
            return None
        small.thumbnail((WIDTH, 4 * WIDTH))
        for quality in QUALITIES:
            target = io.BytesIO()
            small.save(target, "JPEG", quality=quality)
            if target.tell() <= MOST_JPEG_BYTES:
                break
        content, kind = target.getvalue(), "jpeg"
    return picture(content, kind, alt, class_)


def picture(content: bytes, kind: str, alt: str, class_: str) -> Markup:
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return element("img", src=source, alt=alt, class_=f"picture {class_}")
