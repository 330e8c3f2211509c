"""A few photographs."""

from tests.engine.check.conftest import photos  # noqa: F401
