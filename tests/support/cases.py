"""Cases of tests, one in each line of tests/cases/NAME.txt: `case => what the test must find`.

For a message, that is the settings, flags, files and values that it must contain, or words where it has none. For a
function, it is its value.
"""

import re
from collections.abc import Mapping

from tests.support.forks import ROOT
from tests.support.refusals import assert_names


def cases_of(name: str) -> list[str]:
    """Return the cases of a file, to parametrize a test."""
    return [*_read(name)]


def names_of(name: str, case: str) -> list[str]:
    """Return the words that the message for this case must contain."""
    return _read(name)[case].split(" | ")


def value_of(name: str, case: str) -> str:
    """Return the value for this case, as text; // ends a line."""
    return _read(name)[case].replace(" // ", "\n")


def assert_cases(name: str, texts: str | Mapping[str, str]) -> None:
    """Assert that {case: text}, or the text of the case `all`, contain the words of their cases."""
    for case, text in ({"all": texts} if isinstance(texts, str) else texts).items():
        assert_names(text or "(nothing)", *names_of(name, case))


def content_of(case: str) -> str:
    """Return the file content that a case describes: \\n ends a line, <3*ab> is ababab, (nothing) is an empty file."""
    text = case.replace("(nothing)", "").encode().decode("unicode_escape")
    return re.sub(r"<(\d+)\*(.+?)>", lambda found: int(found[1]) * found[2], text)


def _read(name: str) -> dict[str, str]:
    lines = (ROOT / f"tests/cases/{name}.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
    return dict(line.split(" => ") for line in lines)
