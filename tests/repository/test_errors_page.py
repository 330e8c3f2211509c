"""The messages on docs/errors.md are texts of the program."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.forks import ROOT
from tests.support.modules import parsed
from tests.support.pages import text_of

FOLDERS = ("configs", "datasets", "engine", "models", "utils")
VALUE = "\0"  # stands for a value in an f-string
MESSAGES = re.findall(r"\*\*`(.+?)`\*\*", " ".join(text_of("docs/errors.md").split()))


def texts_of(path: Path) -> list[str]:
    """Return the texts in the code of a file, without docstrings."""
    nodes = [*ast.walk(parsed(path))]
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in skipped]
    parts = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    texts += ["".join(part.value if isinstance(part, ast.Constant) else VALUE for part in some) for some in parts]
    return [text for text in texts if isinstance(text, str)]


@functools.cache
def texts_of_the_program() -> list[str]:
    return [text for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") for text in texts_of(path)]


@pytest.mark.parametrize("message", MESSAGES)
def test_message_on_the_errors_page_is_one_of_the_program(message):
    words = message.replace("...", VALUE)
    assert any(words in text for text in texts_of_the_program()), f"docs/errors.md: the program never says: {message}"


def test_errors_page_quotes_messages():
    assert len(MESSAGES) > 20
