"""Compares whole texts with the pages of tests/printed, where a reader finds everything that the program prints.

The page extras/NAME/page is tests/extras/NAME/printed/page.txt, so it is deleted together with the extra.
WRITE_PAGES=1 python -m pytest FILES rewrites the pages of these tests; read the diff before you commit it.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.support.forks import ROOT

PAGES = ROOT / "tests/printed"
WRITES = "WRITE_PAGES" in os.environ
TEMPORARY: list[str] = []  # the parent of all temporary folders of this session
ALWAYS = {
    "date": re.compile(r"(?<=-)20\d{6}-\d\d-\d\d-\d\d\b"),
    "port": re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=\.invalid:)\d+"),
    "address": re.compile(r"\b0x[0-9a-f]{6,}\b"),
    "digest": re.compile(r"(?<=shards-)[0-9a-f]{16}"),
    "weights": re.compile(r"(?<=weights \(SHA-256\): )[0-9a-f]{12}, now [0-9a-f]{12}"),  # random weights
    "time": re.compile(r"(?<=tried for )\d+(?= s)"),
    "data sets": re.compile(r"(?<=\(known: )imagenet2012[^)]*"),  # so that a new data set changes only its own pages
}
_begun: set[str] = set()  # tests whose part of a page was rewritten in this session


def plain(text: str, **named: str | Path | re.Pattern) -> str:
    """Replace the parts that depend on the machine, the clock or a version by <name>, and temporary folders by <folder>."""
    for folder in TEMPORARY:
        text = re.sub(rf"{re.escape(folder)}/[^/\s'\"]*\d", "<folder>", text)
    for name, found in ({"halfstep": ROOT} | named | ALWAYS).items():
        pattern = found if isinstance(found, re.Pattern) else re.compile(re.escape(str(found)))
        text = pattern.sub(f"<{name}>", text)
    return text


def path_of(page: str) -> Path:
    """Return the file of a page."""
    if page.startswith("extras/"):
        _, extra, name = page.split("/")
        return ROOT / f"tests/extras/{extra}/printed/{name}.txt"
    return PAGES / f"{page}.txt"


def page_of_refusals(folder: str) -> str:
    """Return the page for refusals in a folder of tests, such as engine/train or extras/budget; '' means tests/ itself."""
    if folder.startswith("extras/"):
        return f"{folder}/refusals"
    return f"refusals/{folder.replace('/', '-') or 'tests'}"


def same_text(name: str, text: str | Mapping[str, str], **named: str | Path | re.Pattern) -> None:
    """Assert that the text, or {case: text}, equals tests/printed/NAME.txt. For `named` see `plain`."""
    if not isinstance(text, str):
        text = "\n".join(
            line for case, each in text.items() for line in (f"=== {case}", each.strip("\n") or "(nothing)")
        )
    _compare(path_of(name), plain(text, **named).rstrip("\n") + "\n")


def same_message(message: str, page: str = "", case: str = "", **named: str | Path | re.Pattern) -> None:
    """Assert that the page has this message for this case. By default the page is the refusals page of this folder of
    tests, and the case is the running test. // separates lines."""
    test = os.environ["PYTEST_CURRENT_TEST"].removeprefix("tests/").split(" ")[0].split("[")[0]
    folder, _, name = test.rpartition("/")
    path, case = path_of(page or page_of_refusals(folder)), case or name
    message = " // ".join(line.strip() for line in plain(message, **named).strip().split("\n"))
    parts = read_messages(path)
    known = parts.get(case, [])
    if WRITES:
        parts[case] = sorted({*(known if case in _begun else ()), message})
        _begun.add(case)
        cases = parts if page else sorted(parts)
        lines = (f"{line}\n" for each in cases for line in (f"=== {each}", *parts[each]))
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    elif message not in known:
        near = difflib.get_close_matches(message, known, n=1, cutoff=0.0)
        _compare(path, message, "\n".join(near))


def cases_of(page: str) -> list[str]:
    """Return the cases of a page, to parametrize a test. A line `=== CASE` adds one; WRITE_PAGES=1 adds its messages."""
    return [*read_messages(path_of(page))]


def content_of(case: str) -> str:
    """Return the file content that a case describes: \\n ends a line, <3*ab> is ababab, (nothing) is an empty file."""
    text = case.replace("(nothing)", "").encode().decode("unicode_escape")
    return re.sub(r"<(\d+)\*(.+?)>", lambda found: int(found[1]) * found[2], text)


def read_messages(path: Path) -> dict[str, list[str]]:
    """Return {case: its messages} of a page."""
    text = path.read_text(encoding="utf-8").rstrip("\n") if path.exists() else ""
    parts = (part.split("\n") for part in re.split(r"(?:^|\n)=== ", text)[1:])
    return {title: messages for title, *messages in parts}


def _compare(path: Path, text: str, page: str | None = None) -> None:
    if WRITES:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    page = page if page is not None else path.read_text(encoding="utf-8") if path.exists() else ""
    diff = difflib.unified_diff(
        page.split("\n"), text.split("\n"), str(path.relative_to(ROOT)), "printed now", n=1, lineterm=""
    )
    assert page == text, "\n".join([*diff, "to rewrite the page, run this test with WRITE_PAGES=1, then read the diff"])
