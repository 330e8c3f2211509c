"""Fixtures that start small runs."""

from tests.faults.conftest import start, tiny  # noqa: F401
