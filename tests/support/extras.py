"""Tests and cases of the program that also use an extra."""

import pytest

from utils.extras import has_extra


def needing_extra(name: str) -> pytest.MarkDecorator:
    """Skip a test or a case if this extra was deleted."""
    return pytest.mark.skipif(not has_extra(name), reason=f"extras/{name} is not there")
