"""Weights with no two equal numbers."""

from tests.unit.models.conftest import weights  # noqa: F401
