"""Damages files, and checks the names and values in error messages."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


def flip(path: Path, place: int) -> None:
    """Flip a bit in one byte of a file. The file is replaced, so its other hard links keep the old content."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.unlink()
    path.write_bytes(content)


def assert_names(message: str, *names: str | int) -> None:
    """Assert that the message contains these as whole words: settings, flags, files, lines, values; not sentences."""
    missing = [name for name in names if not re.search(rf"(?<!\w){re.escape(str(name))}(?!\w)", message)]
    assert not missing, f"{missing} not in: {message}"


@contextlib.contextmanager
def refused(kind: type[Exception], *names: str | int) -> Iterator[pytest.ExceptionInfo]:
    """Assert that the block raises an error whose message has the names: with refused(ConfigError, "AMP", "x.yaml")."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_names(str(caught.value), *names)
