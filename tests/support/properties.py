"""How many examples Hypothesis draws for a property, and from which seed.

The examples are the same in each run, so that the suite cannot fail by chance. `scripts/test.sh -release` draws 20
times as many, from a seed that it draws, prints, and passes on as EXAMPLES_SEED. tests/conftest.py calls the hooks of
pytest.
"""

import os

import pytest
from hypothesis import HealthCheck, seed, settings

SEED = int(os.environ["EXAMPLES_SEED"]) if os.environ.get("EXAMPLES_SEED") else None


def examples(number: int) -> settings:
    """Return Hypothesis's settings for a test that draws `number` examples.

    Keep an example that failed in the test, as `@example(...)`.
    """
    return settings(
        max_examples=number if SEED is None else 20 * number,
        derandomize=SEED is None,
        database=None,  # a failing example is kept in the test, as @example
        deadline=None,  # no test depends on the speed of the machine
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@pytest.hookimpl(trylast=True)  # after Hypothesis has marked its tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SEED is not None and item.get_closest_marker("hypothesis"):
            seed(SEED)(item.obj)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Say below a failed test how to draw its examples again."""
    report = yield
    if report.failed and SEED is not None and item.get_closest_marker("hypothesis"):
        again = f"EXAMPLES_SEED={SEED} bash scripts/test.sh {item.nodeid}"
        report.sections.append(("drawn examples", f"the same examples again: {again}"))
    return report
