"""A few photographs, and -check as it is typed."""

from tests.engine.check.conftest import check, photos  # noqa: F401
