"""Damage to a file, and what the message of a mistake names: the names and values in it."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.printed import same_message


def flip(path: Path, place: int) -> None:
    """Another bit in one byte of a file, which is made anew: other names of it keep what they have."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.unlink()
    path.write_bytes(content)


def assert_names(message: str, *names: str | int) -> None:
    """The message holds each of these as whole words: settings, flags, files, lines, values; no sentences."""
    missing = [name for name in names if not re.search(rf"(?<!\w){re.escape(str(name))}(?!\w)", message)]
    assert not missing, f"{missing} not in: {message}"


@contextlib.contextmanager
def refused(kind: type[Exception], *names: str | int, whole: bool = True, **named) -> Iterator[pytest.ExceptionInfo]:
    """with refused(ConfigError, "TRAIN.BASE_LR", "x.yaml"): what is inside raises it and names these.

    `whole`: the message is one of the page; not where it is another library's, or where there are very many. `named`: as in
    printed.plain.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert_names(str(caught.value), *names)
    if whole:
        same_message(str(caught.value), **named)
