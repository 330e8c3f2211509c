"""Turns an HTML page into lines: one for each heading, paragraph, row of a table, picture or drawing.

A line is HTML without the end tags that do not matter, after a space for each element around it.
"""

import base64
import hashlib
import io
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser

# The elements that begin a line, unless the line before has no text yet
ON_LINES = set(
    "html head body title meta link style script header main section h1 h2 h3 h4 p div dl table thead tbody tr ul li "
    "figure svg pre details summary footer label".split()
)
WITHOUT_END = {"meta", "link", "img", "input", "br", "path"}
INLINE = {"code", "span", "small", "b", "a", "strong", "button"}  # inside a line, so their ends matter
PICTURE = re.compile(r"data:image/(\w+);base64,([\w+/=]+)")


def lines_of_page(text: str, own_code: Mapping[str, str], describe_picture: Callable[[io.BytesIO], str]) -> list[str]:
    """Return the lines of a page. Style sheets and scripts are named if `own_code`, {path: text}, has them."""
    page = _Page(own_code, describe_picture)
    page.feed(text)
    page.close()
    page.end_line()
    lines = page.lines
    for code in page.code:  # a security policy has their checksums
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        lines = [line.replace(f"sha256-{digest}", "sha256-of-the-style") for line in lines]
    return lines


class _Page(HTMLParser):
    def __init__(self, own_code: Mapping[str, str], describe_picture: Callable[[io.BytesIO], str]):
        super().__init__()
        self.lines: list[str] = []
        self.code: list[str] = []  # the style sheets and scripts in the page
        self._own_code, self._describe_picture = own_code, describe_picture
        self._open: list[str] = []  # the elements on lines that have not ended
        self._line, self._has_text = "", False

    def end_line(self) -> None:
        if self._line.strip():
            self.lines.append(self._line.rstrip())
        self._line, self._has_text = "", False

    def handle_decl(self, decl: str) -> None:
        self._line += f"<!{decl}>"

    def handle_comment(self, data: str) -> None:
        self._line += f"<!--{data}-->"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ON_LINES and self._has_text:
            self.end_line()
        if not self._line:
            self._line = " " * len(self._open)
        words = [tag, *(name if value is None else f'{name}="{self._shown(value)}"' for name, value in attrs)]
        self._line += f"<{' '.join(words)}>"
        self._has_text |= tag not in ON_LINES
        if tag in WITHOUT_END:
            if tag in ON_LINES:
                self.end_line()
        elif tag in ON_LINES:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ON_LINES:
            self.end_line()
            if tag in self._open:
                del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]
        elif tag in INLINE:
            self._line += f"</{tag}>"

    def handle_data(self, data: str) -> None:
        if self._open[-1:] in (["style"], ["script"]):
            self.code.append(data)
            names = [name for name, text in self._own_code.items() if text == data]
            self._line += f"(a copy of {names[0]})" if names else data
            return
        text = data if "pre" in self._open else re.sub(r"\s+", " ", data)
        if self._line or text.strip():
            self._line += text
            self._has_text |= bool(text.strip())

    def _shown(self, value: str) -> str:
        def described(picture: re.Match) -> str:
            lines = self._describe_picture(io.BytesIO(base64.b64decode(picture[2])))
            return f"{picture[1]}: {lines.replace(chr(10), ' ')}"

        return PICTURE.sub(described, value)
