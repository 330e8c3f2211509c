"""Settings are read as if every extra were there, so that these tests pass where one was deleted."""

import pytest


@pytest.fixture(autouse=True)
def every_extra_is_there(monkeypatch):
    monkeypatch.setattr("configs.load.has_extra", lambda name: True)
