"""Which tests run in the same worker of pytest-xdist, and so share fixtures. tests/conftest.py calls the hook."""

import pytest
from xdist.scheduler import LoadScopeScheduling

RUN_HASHES, OUTPUTS = "tests/runs/test_run_hashes.py", "tests/commands/test_outputs.py"


def group_of(test: str) -> str:
    """Return the group of a test: its file, but for two large files its row of a table.

    (The groups of xdist_group need a name of pytest that pytest 9.2 no longer has.)
    """
    file = test.partition("::")[0]
    if file == RUN_HASHES:
        return test.rpartition("-")[0]  # [ROW-WAY]: the ways of a row are compared with the same run
    return test if file == OUTPUTS else file


class Groups(LoadScopeScheduling):
    """Gives each worker one group after the other, large ones first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Groups:
    return Groups(config, log)
