"""A mark for tests and cases that need an extra."""

import pytest

from utils.extras import has_extra


def needing_extra(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test or a case if this extra was deleted."""
    return pytest.mark.skipif(not has_extra(name), reason=f"extras/{name} is missing")
