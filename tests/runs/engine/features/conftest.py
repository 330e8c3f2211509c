"""Fixtures: settings whose runs begin with weights of a file."""

from tests.runs.engine.confidence.conftest import convolutions  # noqa: F401
