"""Weights in which no two numbers are alike."""

from tests.models.conftest import weights  # noqa: F401
