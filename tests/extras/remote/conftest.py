"""Runs that are killed, of small settings."""

from tests.faults.conftest import start, tiny  # noqa: F401
