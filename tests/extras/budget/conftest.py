"""Runs that are killed, and -check as it is typed."""

from tests.engine.check.conftest import check, photos  # noqa: F401
from tests.faults.conftest import start, tiny  # noqa: F401
