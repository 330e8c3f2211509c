"""Fixtures: settings whose runs begin with weights of a file, and the digits as files."""

from tests.engine.confidence.conftest import convolutions  # noqa: F401
from tests.scripts.conftest import digits as digit_files  # noqa: F401
