"""Fixtures: settings whose runs begin with weights of a file, and the digits as files."""

from tests.commands.conftest import digits as digit_files  # noqa: F401
from tests.runs.engine.confidence.conftest import convolutions  # noqa: F401
