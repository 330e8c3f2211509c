"""Fixtures that start small runs, and that run -check."""

from tests.engine.check.conftest import check, photos  # noqa: F401
from tests.faults.conftest import start, tiny  # noqa: F401
