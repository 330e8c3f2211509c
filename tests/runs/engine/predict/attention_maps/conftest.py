"""A model trained on the digits, and the digits as files."""

from tests.commands.conftest import digits, trained  # noqa: F401
