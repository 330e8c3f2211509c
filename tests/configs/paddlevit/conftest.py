"""Weights with no two equal numbers."""

from tests.models.conftest import weights  # noqa: F401
