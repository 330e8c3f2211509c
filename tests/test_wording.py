"""The wording of messages, held to tests/data/messages.json, and nowhere else: other tests hold their names and values."""

import json

import pytest

from tests.support.wording import FILE, messages


@pytest.mark.usefixtures("signal_handlers")
def test_messages_are_worded_as_in_the_file():
    """Where words were improved: python -m tests.support.wording, and read the diff."""
    wanted, found = json.loads(FILE.read_text(encoding="utf-8")), messages()
    assert list(found) == list(wanted)
    for kind, texts in found.items():
        assert texts == wanted[kind], kind
