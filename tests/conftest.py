"""What holds for every test."""

import pytest

from tests.support.processes import kill_started


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running():
    yield
    kill_started()
